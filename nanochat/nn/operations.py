"""The operations that a device may compute its own way, in plain torch, which runs on every device.

A model holds one Operations object and computes norms, rotations, attention and its loss through that object. Each
platform in nanochat/platforms/ returns a subclass with the device's own operators.
Shapes: B batch, T time, H heads, D head dimension, C channels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.nn import loss, plain_attention
from nanochat.nn.lean import weighted_norm
from nanochat.nn.loss import Fused
from nanochat.nn.plain_attention import Masks
from nanochat.nn.previous import shifted, with_offset
from nanochat.nn.together import Multiply, Unit

KEPT_GRAIN = 256  # tokens
Asked = Literal["auto", "fused", "plain"]  # which operators a user may ask for
# Three modules that multiply with the matrices of queries, keys and values, or one function that multiplies with all.
Matrices = Sequence[nn.Module] | Callable[[Tensor], Tensor]


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


class Operations:
    """Plain torch, for every device; the masks that attention needs are made once and kept here."""

    name = "torch's own"
    loss_chunk = 1024  # tokens whose logits exist at the same time
    loss_logits = (
        1 << 25
    )  # logits that exist at the same time where a vocabulary is large, 128 MB in fp32
    capped_logits = (
        1 << 27
    )  # logits that are softcapped at the same time where the loss of each token is wanted
    skips_masked = False  # whether the head leaves out tokens without a target, which makes the host wait for the count
    hidden_score = float("-inf")  # a score that no softmax sees; some chips have no inf
    shape_grain = (
        1  # shapes are rounded up to a multiple of this; above 1, a new shape costs a compilation
    )
    launches_are_dear = (
        False  # whether one operator over many tensors is much cheaper than one for each
    )
    fewest_launches = False  # whether to save operators where that changes how results are rounded

    def __init__(self, stacks_matrices: bool = True):
        """`stacks_matrices`: Muon steps all matrices of one shape together."""
        self.stacks_matrices = stacks_matrices
        self.masks = Masks()

    def finite(self, x: Tensor) -> bool:
        """Whether attention on `x` must mask with a large negative number instead of -inf."""
        return False

    def hold(self, model: nn.Module) -> None:
        """Hold the matrices of a model as the device multiplies them fastest. This is for inference: their values must
        not change before release(). Modules that have a `packed` attribute take part. A weight that is not read
        otherwise, `only_multiplies`, is empty afterwards. Modules that have a method `join` may multiply with several
        at once, and those that have a method `settle` may keep what they compute from their weights."""

    def release(self, model: nn.Module) -> None:
        """Undo hold(), so that a model can take other weights: every weight has its shape again. The weights that were
        empty hold no numbers yet, so load all parameters, and then hold() the model again."""
        for module in model.modules():
            if (undo := getattr(module, "release", None)) is not None:
                undo()

    def coarser(self, dtype: torch.dtype) -> str:
        """In which format uncompiled training of a GPT multiplies more coarsely than in `dtype`, and why; "" if not."""
        return ""

    def needs_no_compiler(self, head_dim: int, dtype: torch.dtype) -> str:
        """Why a training step of the GPT in `dtype` is as fast uncompiled as compiled; "" where compiling pays."""
        return ""

    def put_aside(self, x: Tensor) -> Callable[[], Tensor]:
        """Move a tensor to the host's memory; the function brings it back to its device."""
        if x.is_cpu:
            return lambda: x
        device, host = x.device, torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        host.copy_(
            x.detach(), non_blocking=True
        )  # nothing waits: the copy back comes later in the same stream
        return lambda: host.to(device, non_blocking=True)

    def norm(self, x: Tensor) -> Tensor:
        """RMS norm over the last dimension, without parameters."""
        return F.rms_norm(x, (x.size(-1),))

    def weighted_norm(
        self,
        x: Tensor,  # (..., C)
        weight: Tensor,  # (C,) fp32, or (H, C) for x (..., H, C)
        epsilon: float,
    ) -> Tensor:
        """RMS norm over the last dimension, times a weight for each channel."""
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
        frequency = base ** (
            -torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        )
        angle = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequency)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def rotary(
        self,
        x: Tensor,  # (B, T, H, D)
        cos: Tensor,  # (1 or B, T, 1, D/2), from rotary_tables
        sin: Tensor,  # (1 or B, T, 1, D/2)
    ) -> Tensor:
        """Rotate pairs (i, i + D/2) of channels by -theta, as upstream does: only relative angles matter."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)

    def heads(
        self,
        x: Tensor,  # (B, T, C)
        matrices: Matrices,  # to queries, keys and values
        head_dim: int,
        cos: Tensor,  # from rotary_tables
        sin: Tensor,
        sharpen: float,
        made: Tensor | None = None,  # the matrices as one, from cast_together()
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
        made: Sequence[Tensor]
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
        most: Tensor,  # (1,) fp32
    ) -> Tensor:  # (B, T, C)
        """x plus a gated part of the token before: most sigmoid(gate) times it."""
        before = shifted(x) if before is None else before
        return (
            x
            + most.to(x.dtype) * torch.sigmoid(gate(x[..., : cast(int, gate.in_features)])) * before
        )

    def offset_keys(self, k: Tensor) -> Tensor:  # (B, T, Hkv, D)
        """Keys of whole sequences, half of each from the token before; see previous.with_offset."""
        return with_offset(k, shifted(k))

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

    def token_losses(
        self, x: Tensor, head: Tensor, targets: Tensor, vocab: int
    ) -> Tensor:  # (N,) fp32
        """See loss.token_losses."""
        chunk = min(self.loss_chunk, max(self.capped_logits // vocab, 16))
        return loss.token_losses(x, head, targets, vocab, chunk)

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
    ) -> Tensor:  # () fp32
        """See loss.chunked_loss."""
        x, targets, weights = self.with_targets(x, targets, weights)
        fused, multiply = self.fused_loss(x), self.training_logits(x, head)
        return loss.chunked_loss(
            x,
            head,
            targets,
            vocab,
            weights,
            self.loss_chunk,
            self.hidden_score,
            fused=fused,
            multiply=multiply,
        )

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
        wanted = targets >= 0
        count = max(-(-int(wanted.sum()) // KEPT_GRAIN), 1) * KEPT_GRAIN
        if count >= len(targets):
            return x, targets, weights
        kept = wanted.logical_not().int().argsort(stable=True)[:count]
        return x[kept], targets[kept], None if weights is None else weights[kept]

    def training_logits(
        self, x: Tensor, head: Tensor
    ) -> Multiply | None:  # (N, C), (V', C) fp32 master
        """What multiplies with the head in training, where fused_loss() takes part; None: torch does."""
        return None

    def fused_loss(self, x: Tensor) -> Fused | None:  # (N, C) normed activations
        """What computes a chunk of a loss in one function; None: torch's operators do."""
        return None

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
        made: Sequence[Tensor | None],  # both matrices in the compute dtype, from cast_together()
    ) -> Tensor:  # (..., C)
        """Two matrices with a squared ReLU between them."""
        return out(self.squared_relu(into(x, made[0])), made[1])

    def project(
        self,
        x: Tensor,  # (..., inputs)
        matrix: nn.Module,
        made: Tensor | None,  # the matrix in the compute dtype, from cast_together()
    ) -> Tensor:  # (..., outputs)
        """A matrix, such as the one that attention's heads are joined by."""
        return matrix(x, made)

    def square_sums(self, gradients: Sequence[Tensor]) -> Tensor:  # (number of gradients,) fp32
        """The sum of squares of each tensor."""
        return torch.stack([g.float().square().sum() for g in gradients])

    def attend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        window: int,
        scale: float | None = None,  # of the scores, default 1/sqrt(D)
    ) -> Tensor:  # (B, T, H, D)
        """Causal attention in which a query also sees at most `window` keys before its own."""
        return plain_attention.attend(q, k, v, window, scale, self.masks, self.finite(q))

    def attend_cached(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D) cached keys, the new keys included
        v: Tensor,  # (B, K, Hkv, D)
        mask: Tensor,  # (B, 1, T, K) from plain_attention.cache_mask
        scale: float | None = None,  # of the scores, default 1/sqrt(D)
    ) -> Tensor:  # (B, T, H, D)
        """Attention of new queries over a cache; rows may be at different places."""
        return plain_attention.masked(q, k, v, mask, scale, self.finite(q))

    def extends(self, q: Tensor, held_k: Tensor) -> bool:
        """Whether extend() serves queries (B, T, H, D) over a cache (B, K, Hkv, D)."""
        return False

    def extend(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, T, Hkv, D)
        v: Tensor,  # (B, T, Hkv, D)
        held_k: Tensor,  # (B, K, Hkv, D) of the cache, overwritten at `places`
        held_v: Tensor,  # (B, K, Hkv, D)
        places: Tensor,  # (B, T) where in its row each new token goes, one after the other
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """Write the new keys and values into the cache and attend to what the rows hold, where extends() is True."""
        raise NotImplementedError(f"{type(self).__name__} writes and attends in several operators")

    def takes_lengths(self, q: Tensor) -> bool:
        """Whether attention of the queries (B, T, H, D) over a cache reads the rows' lengths instead of a mask."""
        return False

    def attend_lengths(
        self,
        q: Tensor,  # (B, T, H, D)
        k: Tensor,  # (B, K, Hkv, D) cached keys, the new keys included
        v: Tensor,  # (B, K, Hkv, D)
        fresh: Sequence[int],  # of each row, how many of the T tokens are real
        ends: Sequence[int],  # of each row, how many keys it holds
        last: Tensor
        | None,  # (B, W + 1) places of the last keys of each row; given where there is one query
        window: int,
        scale: float | None = None,
    ) -> Tensor:  # (B, T, H, D)
        """attend_cached() by lengths, for devices whose takes_lengths() says True."""
        raise NotImplementedError(f"{type(self).__name__} attends over a cache by mask")
