"""The operators that a device may compute its own way, in plain torch, which runs on every device.

Each platform returns a subclass with the device's own operators. The layers in layers.py call them; models that are not
accelerated know nothing of them. Shapes: B batch, T time, H heads, D head dimension, C channels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat import loss
from nanochat.attention import PlainAttention
from nanochat.context import Rows
from nanochat.gpt import offset_keys, rms_norm, rotary_tables, rotate
from nanochat.linear import Linear
from nanochat.muon import MuonArithmetic
from nanochat.platforms.together import Unit, restore

KEPT_GRAIN = 256  # tokens
HIDDEN = (
    -3e4
)  # a score that no fp16 softmax sees, and that stays finite when another is added to it
Asked = Literal["auto", "fused", "plain"]  # which operators a user may ask for
# Three modules that multiply with the matrices of queries, keys and values, or one function that multiplies with all.
Matrices = Sequence[nn.Module] | Callable[[Tensor], Tensor]


def finite_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores: 0 where a key is seen, a large negative number, never -inf, where it is not."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, HIDDEN
    )


def times(matrix: nn.Module, x: Tensor, cast_weight: Tensor | None) -> Tensor:
    """Multiply with a matrix, or with its weight if that was cast before."""
    return matrix(x) if cast_weight is None else F.linear(x, cast_weight)


def multiplied(
    x: Tensor,  # (B, T, C)
    matrices: Matrices,  # queries have C channels
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
    """Queries, keys and values."""
    if callable(matrices):
        heads = matrices(x).unflatten(-1, (-1, head_dim))
        queries = x.size(-1) // head_dim
        keys = (heads.size(2) - queries) // 2
        q, k, v = heads.split((queries, keys, keys), dim=2)
    else:
        q, k, v = (matrix(x).unflatten(-1, (-1, head_dim)) for matrix in matrices)
    return q, k, v


class Operations(PlainAttention):
    """Plain torch, for every device: attention, and the operators that layers.py calls."""

    fuses_layers = False  # whether accelerate() swaps layers that call these operators into models
    loss_chunk = 1024  # tokens whose logits exist at the same time
    loss_logits = (
        1 << 25
    )  # logits that exist at the same time where a vocabulary is large, 128 MB in fp32
    capped_logits = (
        1 << 27
    )  # logits that are softcapped at the same time where the loss of each token is wanted
    skips_masked = (
        False  # whether the loss leaves out tokens without a target, for whose count the host waits
    )
    muon_class: type[MuonArithmetic] = MuonArithmetic
    fewest_launches = False  # whether to save operators where that changes how results are rounded

    def __init__(self, stacks_matrices: bool = True):
        """`stacks_matrices`: Muon steps all matrices of one shape together."""
        super().__init__()
        self.muon = self.muon_class(stacks_matrices)

    def serve(self, model: nn.Module) -> None:
        """Let a model multiply as the device does fastest. This is for inference: weights must not change before
        release(), and those that are not read otherwise are empty afterwards."""

    def release(self, model: nn.Module) -> None:
        """Undo serve(), so that a model can take other weights: every weight has its shape again. The weights that were
        empty hold no numbers yet, so load all parameters, and then serve() the model again."""
        for module in model.modules():
            if hasattr(module, "multiply"):
                setattr(module, "multiply", None)  # noqa: B010 - not an attribute of every module
            if isinstance(module, Linear):
                restore(module)
            undo = getattr(module, "release", None)
            if undo is not None:
                undo()

    def coarser(self, dtype: torch.dtype) -> str:
        """In which format uncompiled training of a GPT multiplies more coarsely than in `dtype`, and why; "" if not."""
        return ""

    def needs_no_compiler(self, head_dim: int, dtype: torch.dtype) -> str:
        """Why a training step of the GPT in `dtype` is as fast uncompiled as compiled; "" where compiling pays."""
        return ""

    def norm(self, x: Tensor) -> Tensor:
        """RMS norm over the last dimension, without parameters."""
        return rms_norm(x)

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """RMS norm over the last dimension, times a weight for each channel."""
        from nanochat.models.qwen.functions import weighted_norm

        return weighted_norm(x, weight, epsilon)

    def rotary_tables(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        base: float = 100_000,
    ) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding (RoFormer, arXiv 2104.09864), as rotary() reads them: here
        (length, D/2) each."""
        return rotary_tables(length, head_dim, device, dtype, base)

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D/2), from rotary_tables
        sin: Tensor,  # (1 or B, T, 1, D/2)
    ) -> Tensor:
        """Rotate pairs (i, i + D/2) of channels by -theta, as upstream does: only relative angles matter."""
        return rotate(x, cos, sin)

    def heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,  # to queries, keys and values
        head_dim: int,
        cos: Tensor,  # from rotary_tables
        sin: Tensor,
        sharpen: float,
        joined_weight: Tensor | None = None,  # the matrices as one, from cast_together()
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        """Queries and keys, rotated, normed and multiplied by `sharpen`, and values.

        A device that multiplies the scores instead leaves `sharpen` out here and puts it into softmax_scale().
        """
        q, k, v = multiplied(x, matrices, head_dim)
        q = self.norm(self.rotary(q, cos, sin)) * sharpen
        k = self.norm(self.rotary(k, cos, sin)) * sharpen
        return q, k, v

    def cast_together(
        self, layers: Sequence[Sequence[Unit]], dtype: torch.dtype
    ) -> list[list[Tensor]] | None:
        """The matrices of all layers in the compute dtype, one for each unit; None: every use casts its own."""
        return None

    def gated_heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,  # to queries, keys and values
        gate: nn.Module,  # from the first channels of x to (B, T, Hkv)
        value: Tensor,  # (B, T, Hkv * D) value embedding of each token
        head_dim: int,
        cos: Tensor,  # from rotary_tables
        sin: Tensor,
        sharpen: float,
        cast_weights: Sequence[Tensor]
        | None = None,  # the matrices as one, and the gate's, from cast_together()
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        """As heads(), and each head of a value gains 3 sigmoid(gate) times the value embedding."""
        q, k, v = self.heads(x, matrices, head_dim, cos, sin, sharpen)
        logits = gate(x[..., : cast(int, gate.in_features)])
        return q, k, v + (3 * torch.sigmoid(logits)).unsqueeze(-1) * value.view_as(v)

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """a x + b x0, and the x0 to give to the next layer."""
        return a * x + b * x0, x0

    def smear(
        self,
        x: Tensor,  # (B, T, C)
        before: Tensor
        | None,  # (B, T, C) x of the token before each token; None: the rows of x are whole sequences
        gate: nn.Module,  # from the first channels of x to (B, T, 1)
        smear_lambda: Tensor,  # (1,) fp32
    ) -> Tensor:  # (B, T, C)
        """x plus a gated part of the token before: most sigmoid(gate) times it."""
        before = Rows().previous(x) if before is None else before
        return (
            x
            + smear_lambda.to(x.dtype)
            * torch.sigmoid(gate(x[..., : cast(int, gate.in_features)]))
            * before
        )

    def offset_keys(self, k: Tensor) -> Tensor:  # (B, T, Hkv, D)
        """Keys of whole sequences, half of each from the token before; see gpt.offset_keys."""
        return offset_keys(k, Rows().previous(k))

    def backout(
        self, x: Tensor, middle: Tensor, share: Tensor
    ) -> Tensor:  # (B, T, C) twice, (1,) fp32
        """x without a share of what it was in the middle of the network."""
        return x - share.to(x.dtype) * middle

    def norm_and_keep(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (..., C)
        """norm(x), and the x to use from there on."""
        return self.norm(x), x

    def add_norm(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """norm(x + y), and x + y."""
        x = x + y
        return self.norm(x), x

    def add_weighted_norm(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """weighted_norm(x + y), and x + y."""
        x = x + y
        return self.weighted_norm(x, weight, epsilon), x

    def normed_heads(
        self,
        x: Tensor,  # (B, T, H, D)
        weight: Tensor,  # (H, D) fp32
        epsilon: float,
        cos: Tensor,  # from rotary_tables
        sin: Tensor,
    ) -> Tensor:  # (B, T, H, D)
        """weighted_norm() of each head, then rotated."""
        return self.rotary(self.weighted_norm(x, weight, epsilon), cos, sin)

    def swiglu(self, x: Tensor) -> Tensor:  # (..., 2 N) -> (..., N)
        """silu of the first half of the channels, times the second half, without gradients."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def softcap(self, logits: Tensor) -> Tensor:  # (..., V) -> (..., V) fp32
        """See loss.softcap."""
        return loss.softcap(logits)

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """The logarithm of the sum of each row's exponentials; None where a log_softmax costs less."""
        return None

    def loss(
        self,
        x: Tensor,  # (N, C) normed activations
        head: Tensor,  # (V', C) fp32 master
        targets: Tensor,  # (N,) token ids, -1 = ignored
        vocab: int,
        weights: Tensor | None,  # (N,) weight of each token's loss
        chunk: int,
        capped: bool = True,
    ) -> Tensor:  # () fp32
        """See loss.chunked_loss."""
        x, targets, weights = self.with_targets(x, targets, weights)
        return loss.chunked_loss(x, head, targets, vocab, weights, chunk, capped)

    def with_targets(
        self,
        x: Tensor,  # (N, C) normed activations
        targets: Tensor,  # (N,) token ids, -1 = ignored
        weights: Tensor | None,  # (N,)
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # (n, C), (n,), (n,)
        """What a loss needs of its arguments: without most tokens that have no target, where the device skips them. As
        many stay as fill a multiple of KEPT_GRAIN, since memory of ever new sizes is used again less often."""
        if not self.skips_masked or is_compiling():  # compiled code wants one shape
            return x, targets, weights
        has_target = targets >= 0
        count = max(-(-int(has_target.sum()) // KEPT_GRAIN), 1) * KEPT_GRAIN
        if count >= len(targets):
            return x, targets, weights
        index = has_target.logical_not().int().argsort(stable=True)[:count]
        return x[index], targets[index], None if weights is None else weights[index]

    def softmax_scale(self, head_dim: int, sharpen: float) -> float | None:
        """The factor of the scores that attend() is to be given after heads(); None means 1/sqrt(D)."""
        return None

    def squared_relu(self, x: Tensor) -> Tensor:
        """relu(x)^2."""
        return F.relu(x).square()

    def mlp(
        self,
        x: Tensor,  # (..., C)
        into: nn.Module,  # the matrix from x to the inner channels
        out: nn.Module,  # the matrix from the inner channels
        cast_weights: Sequence[
            Tensor | None
        ],  # both matrices in the compute dtype, from cast_together()
    ) -> Tensor:  # (..., C)
        """Two matrices with a squared ReLU between them."""
        return times(out, self.squared_relu(times(into, x, cast_weights[0])), cast_weights[1])

    def project(
        self,
        x: Tensor,  # (..., inputs)
        matrix: nn.Module,
        cast_weight: Tensor | None,  # the matrix in the compute dtype, from cast_together()
    ) -> Tensor:  # (..., outputs)
        """A matrix, such as the one that attention's heads are joined by."""
        return times(matrix, x, cast_weight)

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """The sum of squares of each tensor."""
        return torch.stack([g.float().square().sum() for g in gradients])
