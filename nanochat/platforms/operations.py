"""Plain-torch versions of the operators that a device may implement in its own way.

Each platform returns a subclass with the device's own operators. The layers in layers.py and
qwen_layers.py call them. Models that are not accelerated never use them. Shapes: B batch, T time,
H heads, D head dimension, C channels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat import loss
from nanochat.attention import PlainAttention
from nanochat.context import Context
from nanochat.gpt import exclude_own, offset_keys, rms_norm, rotary_tables, rotate
from nanochat.linear import Linear
from nanochat.loss import Criterion
from nanochat.muon import MuonArithmetic
from nanochat.platforms.together import HasUnits, restore

ROW_GRAIN = 256  # a loss that skips tokens reads a multiple of this number of tokens
# A score that vanishes in a softmax, even in fp16, and that stays finite when another is added.
HIDDEN = -3e4
KernelChoice = Literal["auto", "fused", "plain"]  # which operators a user may ask for
Matmul = Literal["auto", "bf16", "fp8", "int8"]  # the number format of matrix products
# Three modules with the query, key and value matrices, or one function that multiplies with all
# three.
Matrices = Sequence[nn.Module] | Callable[[Tensor], Tensor]


def finite_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores, with 0 for visible keys and HIDDEN for the others.

    HIDDEN is a large negative number, so scores never become -inf.
    """
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, HIDDEN)


def times(
    matrix: nn.Module,
    x: Tensor,
    cast_weight: Tensor | None,  # the weight in the compute dtype, if it was already cast
) -> Tensor:
    """Return the product of x and a matrix, using `cast_weight` if it is given."""
    if cast_weight is None:
        return matrix(x)
    return F.linear(x, cast_weight)


def multiplied(
    x: Tensor,  # (B, T, C)
    matrices: Matrices,  # queries have C channels in total
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
    """Return queries, keys and values, split into heads."""
    if callable(matrices):
        heads = matrices(x).unflatten(-1, (-1, head_dim))
        query_heads = x.size(-1) // head_dim
        key_heads = (heads.size(2) - query_heads) // 2
        q, k, v = heads.split((query_heads, key_heads, key_heads), dim=2)
    else:
        q, k, v = (matrix(x).unflatten(-1, (-1, head_dim)) for matrix in matrices)
    return q, k, v


class Operations(PlainAttention):
    """Attention, and the operators that faster layers call, in plain torch for every device."""

    fuses_layers = False  # whether accelerate() swaps in layers that call these operators
    loss_chunk = 1024  # tokens whose logits exist at the same time
    # Logits that exist at the same time with a large vocabulary, which is 128 MB in fp32.
    loss_logits = 1 << 25
    # Logits that are softcapped at the same time if each token's own loss is wanted.
    capped_logits = 1 << 27
    # Whether the loss skips tokens without a target, which makes the host wait for their count.
    skips_masked = False
    muon_class: type[MuonArithmetic] = MuonArithmetic

    def __init__(self, stacks_matrices: bool = True):
        """With `stacks_matrices`, Muon updates all matrices of one shape together."""
        super().__init__()
        self.muon = self.muon_class(stacks_matrices)

    # --- serving ---------------------------------------------------------------------------------

    def serve(self, model: nn.Module) -> None:
        """Prepare a model for the fastest inference on this device.

        The weights must not change until release(). Weights that are copied into another layout may
        become empty.
        """

    def release(self, model: nn.Module) -> None:
        """Undo serve(), so that a model can load other weights.

        Weights that serve() emptied regain their shapes, but not their values: load all parameters,
        and then call serve() again.
        """
        for module in model.modules():
            if hasattr(module, "multiply"):
                cast(Any, module).multiply = None
            if isinstance(module, Linear):
                restore(module)
            release = getattr(module, "release", None)
            if release is not None:
                release()

    # --- compiling -------------------------------------------------------------------------------

    def prepare_compiling(self) -> None:
        """Do what must be done before torch's compiler reads a model that trains."""

    # --- what a user is told ---------------------------------------------------------------------

    def needs_no_compiler(self, head_dim: int, dtype: torch.dtype) -> str:
        """Return why compiling would not speed up training a GPT in `dtype`, or "" if it may."""
        return ""

    # --- norms -----------------------------------------------------------------------------------

    def norm(self, x: Tensor) -> Tensor:
        """Return x normalized to an RMS of 1 over the last dimension, without parameters."""
        return rms_norm(x)

    def norm_and_keep(self, x: Tensor) -> tuple[Tensor, Tensor]:  # (..., C)
        """Return norm(x), and x for later use, so that a device can join the gradients of both."""
        return self.norm(x), x

    def add_norm(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
    ) -> tuple[Tensor, Tensor]:
        """Return norm(x + y), and x + y."""
        x = x + y
        return self.norm(x), x

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """Return the RMS norm of x over the last dimension, times a weight for each channel."""
        from nanochat.models.qwen.functions import weighted_norm

        return weighted_norm(x, weight, epsilon)

    def add_weighted_norm(
        self,
        x: Tensor,  # (..., C)
        y: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """Return weighted_norm(x + y), and x + y."""
        x = x + y
        return self.weighted_norm(x, weight, epsilon), x

    # --- heads -----------------------------------------------------------------------------------

    def rotary_tables(
        self,
        length: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        base: float = 100_000,
        divisors: Tensor | None = None,  # (D/2,) of the frequencies
    ) -> tuple[Tensor, Tensor]:  # (length, D/2) each
        """Return the cosines and sines of the rotary embedding, in the layout that rotary() reads.

        Source: RoFormer, arXiv 2104.09864.
        """
        return rotary_tables(length, head_dim, device, dtype, base, divisors)

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D/2), from rotary_tables
        sin: Tensor,  # (1 or B, T, 1, D/2)
    ) -> Tensor:
        """Return x with channel pairs (i, i + D/2) rotated by -theta, as upstream does.

        The direction is only a convention, but it must match the one the weights were trained with;
        to rotate the other way, negate `sin`.
        """
        return rotate(x, cos, sin)

    def normed_heads(
        self,
        x: Tensor,  # (B, T, H, D)
        weight: Tensor,  # (H, D) fp32
        epsilon: float,
        cos: Tensor,  # from rotary_tables
        sin: Tensor,
    ) -> Tensor:  # (B, T, H, D)
        """Return the heads after weighted_norm() and then rotary()."""
        normed = self.weighted_norm(x, weight, epsilon)
        return self.rotary(normed, cos, sin)

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
        """Return queries and keys (rotated, normalized and multiplied by `sharpen`), and values.

        A device may instead include the factor `sharpen` in softmax_scale().
        """
        q, k, v = multiplied(x, matrices, head_dim)
        q = self.norm(self.rotary(q, cos, sin)) * sharpen
        k = self.norm(self.rotary(k, cos, sin)) * sharpen
        return q, k, v

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
        # The matrices as one, and the gate's, from cast_together().
        cast_weights: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # (B, T, H, D), (B, T, Hkv, D), (B, T, Hkv, D)
        """Return the results of heads(), with 3 sigmoid(gate) times `value` added to the values."""
        q, k, v = self.heads(x, matrices, head_dim, cos, sin, sharpen)
        logits = gate(_first_channels(x, gate))
        opened = 3 * torch.sigmoid(logits)
        return q, k, v + opened.unsqueeze(-1) * value.view_as(v)

    def offset_keys(self, k: Tensor) -> Tensor:  # (B, T, Hkv, D)
        """Return k with half of each key taken from the token before (see gpt.offset_keys).

        Every row is one whole sequence, so that half is 0 for its first token.
        """
        return offset_keys(k, Context().previous(k))

    def softmax_scale(self, head_dim: int, sharpen: float) -> float | None:
        """Return the `scale` to pass to attend() after heads(), or None for 1/sqrt(D)."""
        return None

    def exclude_own(
        self,
        y: Tensor,  # (B, T, H, D) what attention computed
        v: Tensor,  # (B, T, Hkv, D)
    ) -> Tensor:  # (B, T, H, D)
        """Return y without its component along each token's own value (see gpt.exclude_own)."""
        return exclude_own(y, self.norm(v))

    def project(
        self,
        x: Tensor,  # (..., inputs)
        matrix: nn.Module,
        cast_weight: Tensor | None,  # the matrix in the compute dtype, from cast_together()
    ) -> Tensor:  # (..., outputs)
        """Return the product of x and a matrix, such as the output matrix of attention."""
        return times(matrix, x, cast_weight)

    # --- the rest of a layer ---------------------------------------------------------------------

    def cast_together(
        self,
        layers: Sequence[HasUnits],
        dtype: torch.dtype,
    ) -> list[list[Tensor]] | None:
        """Return a list of lists: for each layer, each of its units() as a matrix in `dtype`.

        Returns None if each matrix is to be cast wherever it is used.
        """
        return None

    def mlp(
        self,
        x: Tensor,  # (..., C)
        into: nn.Module,  # the matrix from x to the inner channels
        out: nn.Module,  # the matrix from the inner channels
        # Both matrices in the compute dtype, from cast_together().
        cast_weights: Sequence[Tensor | None],
    ) -> Tensor:  # (..., C)
        """Return x multiplied by two matrices, with a squared ReLU in between."""
        into_weight, out_weight = cast_weights
        inner = self.squared_relu(times(into, x, into_weight))
        return times(out, inner, out_weight)

    def squared_relu(self, x: Tensor) -> Tensor:
        """Return relu(x)^2."""
        return F.relu(x).square()

    def swiglu(self, x: Tensor) -> Tensor:  # (..., 2 N) -> (..., N)
        """Return silu(first half of the channels) times the second half, for inference."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    # --- between layers --------------------------------------------------------------------------

    def smear(
        self,
        x: Tensor,  # (B, T, C)
        # (B, T, C) x of the token before each token, or None if the rows of x are whole sequences.
        previous: Tensor | None,
        gate: nn.Module,  # from the first channels of x to (B, T, 1)
        smear_lambda: Tensor,  # (1,) fp32
    ) -> Tensor:  # (B, T, C)
        """Return x plus smear_lambda sigmoid(gate(x)) times the x of the token before.

        The first token of a sequence is left unchanged.
        """
        if previous is None:
            previous = Context().previous(x)
        opened = torch.sigmoid(gate(_first_channels(x, gate)))
        return x + smear_lambda.to(x.dtype) * opened * previous

    def mix(
        self,
        x: Tensor,  # (B, T, C)
        x0: Tensor,  # (B, T, C)
        a: Tensor,  # ()
        b: Tensor,  # ()
    ) -> tuple[Tensor, Tensor]:
        """Return a x + b x0, and the x0 to give to the next layer."""
        return a * x + b * x0, x0

    def backout(
        self,
        x: Tensor,  # (B, T, C)
        middle: Tensor,  # (B, T, C)
        share: Tensor,  # (1,) fp32
    ) -> Tensor:
        """Return x minus `share` times `middle`, the activations halfway through the network."""
        return x - share.to(x.dtype) * middle

    # --- logits and loss -------------------------------------------------------------------------

    def softcap(self, logits: Tensor) -> Tensor:  # (..., V) -> (..., V) fp32
        """Return logits squashed smoothly to (-15, 15); see loss.softcap."""
        return loss.softcap(logits)

    def log_totals(self, logits: Tensor) -> Tensor | None:  # (B, V) fp32 -> (B,)
        """Return the log-sum-exp of each row, or None if log_softmax is cheaper on this device."""
        return None

    def loss(
        self,
        x: Tensor,  # (N, C) normed activations
        head: Tensor,  # (V', C) fp32 master
        targets: Tensor,  # (N,) token ids, -1 = ignored
        criterion: Criterion,
        weights: Tensor | None,  # (N,) weight of each token's loss
        chunk: int,
    ) -> Tensor:  # () fp32
        """Return the weighted sum of the tokens' losses in nats; see loss.chunked_loss."""
        x, targets, weights = self.with_targets(x, targets, weights)
        criterion = self.fused(criterion, x)
        return loss.chunked_loss(x, head, targets, criterion, weights, chunk)

    def token_losses(
        self,
        x: Tensor,  # (N, C) normed activations
        head: Tensor,  # (V', C) fp32 master
        targets: Tensor,  # (N,) token ids, -1 = ignored
        criterion: Criterion,
        chunk: int,
    ) -> Tensor:  # (N,) fp32 nats, 0 if ignored
        """Return the loss of each token; see loss.token_losses."""
        criterion = self.fused(criterion, x)
        rows = self.rows_with_targets(targets)
        if rows is None:
            return loss.token_losses(x, head, targets, criterion, chunk)
        losses = loss.token_losses(x[rows], head, targets[rows], criterion, chunk)
        return losses.new_zeros(len(targets)).index_copy(0, rows, losses)

    def fused(self, criterion: Criterion, x: Tensor) -> Criterion:  # x: (N, C)
        """Return a criterion that computes the same losses of x faster, or `criterion` itself."""
        return criterion

    def with_targets(
        self,
        x: Tensor,  # (N, C) normed activations
        targets: Tensor,  # (N,) token ids, -1 = ignored
        weights: Tensor | None,  # (N,)
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # (n, C), (n,), (n,)
        """Return `x`, `targets` and `weights` without most of the tokens that have no target."""
        rows = self.rows_with_targets(targets)
        if rows is None:
            return x, targets, weights
        row_weights = None if weights is None else weights[rows]
        return x[rows], targets[rows], row_weights

    def rows_with_targets(self, targets: Tensor) -> Tensor | None:  # (N,) -> (n,)
        """Return the tokens for which the head is computed, or None for all tokens.

        Tokens are dropped only in uncompiled code and only if `skips_masked` is set. Those with a
        target then come first, and a multiple of 256 tokens (ROW_GRAIN) remains, because tensors of
        many different sizes reuse memory less often. If that drops none, nothing is reordered.
        """
        if not self.skips_masked or is_compiling():  # compiled code wants one shape
            return None
        has_target = targets >= 0
        grains = -(-int(has_target.sum()) // ROW_GRAIN)
        count = max(grains, 1) * ROW_GRAIN
        if count >= len(targets):
            return None
        targets_first = has_target.logical_not().int().argsort(stable=True)
        return targets_first[:count]

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """Return the sum of squares of each gradient."""
        sums = [gradient.float().square().sum() for gradient in gradients]
        return torch.stack(sums)


def _first_channels(x: Tensor, gate: nn.Module) -> Tensor:
    """Return the channels of x that a gate reads."""
    return x[..., : cast(int, gate.in_features)]
