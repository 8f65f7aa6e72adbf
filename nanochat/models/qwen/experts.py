"""A mixture of experts (arXiv 1701.06538), which takes the place of the MLP in a layer.

For each token, a router chooses a few experts, which are small MLPs, and adds up their outputs,
weighted by their shares. In Qwen3.5, every token also passes through a shared expert. A token costs
as much as the experts that it passes through, however many others there are.

Training adds no loss that balances the experts; docs/finetune.md says why.

Shapes: N tokens, E experts, K experts of each token, C channels.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from nanochat.linear import Linear, plus_product
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.functions import swiglu

# The two factors of an adapter, in a dtype: (E, rank, inputs) and (E, outputs, rank), the second one
# times the adapter's scale.
Factors = Callable[[torch.dtype], tuple[Tensor, Tensor]]


class Router(nn.Module):
    """Chooses the experts of each token by the softmax of a linear score, which is in fp32."""

    def __init__(self, config: QwenConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.n_embd))

    def forward(
        self,
        x: Tensor,  # (N, C)
    ) -> tuple[Tensor, Tensor]:  # (N, K) each
        """Return the numbers of each token's experts, and their shares in the format of x."""
        K = self.config.experts_per_token
        weight = self.weight.to(x.dtype)
        scores = F.linear(x, weight)  # (N, E)
        probabilities = F.softmax(scores, dim=-1, dtype=torch.float32)
        shares, chosen = probabilities.topk(K, dim=-1)
        if self.config.normed_shares:
            shares = shares / shares.sum(dim=-1, keepdim=True)
        return chosen, shares.to(x.dtype)


class Experts(nn.Module):
    """The experts of a layer, whose matrices are stacked in two parameters.

    The parameters are named as in transformers. `gate_up_proj` holds the gate matrix of each expert
    above its up matrix. An adapter of a stack is stored in `adapters` under the stack's name.
    """

    def __init__(self, config: QwenConfig):
        super().__init__()
        E = config.n_experts
        C = config.n_embd
        inner = config.n_expert_hidden
        gate_up = torch.empty(E, 2 * inner, C)
        down = torch.empty(E, C, inner)
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(gate_up)
        self.down_proj = nn.Parameter(down)
        self.adapters: dict[str, Factors] = {}

    def forward(
        self,
        x: Tensor,  # (N, C)
        chosen: Tensor,  # (N, K) numbers of the experts
        shares: Tensor,  # (N, K)
    ) -> Tensor:  # (N, C)
        """Return the outputs of each token's experts, times their shares, added up.

        This loop over the experts is the specification. Devices replace it by a faster form, in
        which the tokens of an expert lie next to each other; see platforms/grouped_experts.py.
        """
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            is_chosen = chosen == expert
            token, place = is_chosen.nonzero(as_tuple=True)
            hidden = self._product("gate_up_proj", expert, x[token])
            gate, up = hidden.chunk(2, dim=-1)
            output = self._product("down_proj", expert, swiglu(gate, up))
            share = shares[token, place, None]
            y = y.index_add(0, token, output * share)
        return y

    def stack(self, name: str) -> Tensor:  # (E, outputs, inputs)
        """Return the matrices of all experts, "gate_up_proj" or "down_proj"."""
        return cast(Tensor, getattr(self, name))

    def _product(
        self,
        stack: str,
        expert: int,
        x: Tensor,  # (n, inputs), the tokens of the expert
    ) -> Tensor:  # (n, outputs)
        """Return the product of x with an expert's matrix, plus what the stack's adapter adds."""
        weight = self.stack(stack)[expert].to(x.dtype)
        if stack not in self.adapters:
            return F.linear(x, weight)
        first, second = self.adapters[stack](x.dtype)
        added = F.linear(F.linear(x, first[expert]), second[expert])
        return plus_product(added, x, weight)


class MixtureOfExperts(nn.Module):
    """The router and the experts of a layer, with the shared expert that Qwen3.5 adds."""

    def __init__(self, config: QwenConfig, shared_expert: nn.Module | None):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_expert: nn.Module | None = None
        self.shared_expert_gate: Linear | None = None
        if shared_expert is not None:
            self.shared_expert = shared_expert
            self.shared_expert_gate = Linear(config.n_embd, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        flat = x.flatten(0, 1)
        chosen, shares = self.gate(flat)
        y = self.experts(flat, chosen, shares).view_as(x)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return y
        share = torch.sigmoid(self.shared_expert_gate(x))  # (B, T, 1)
        return y + share * self.shared_expert(x)
