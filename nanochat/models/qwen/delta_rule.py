"""The gated delta rule (arXiv 2412.06464): one memory matrix for each head, by which tokens recall.

The memory S (Dk, Dv) gives a value for a key. Token t has a query q, a key k, a value v, a decay a
and a strength b, both from 0 to 1. It fades the memory, corrects what the memory has for its key by
a share b, and reads the memory with its query:

    S <- a S
    w = b (v - S^T k)    what the token writes, (Dv,)
    S <- S + k w^T
    o = S^T q            what the token reads, (Dv,)

step() does this for one token of each row, in decoding. chunked() serves training and prefill: it
computes the same for C tokens at a time, with matmuls only. tests/models/test_delta_rule.py has the
four lines above as a loop, and compares both with it.

Let S be the memory before a chunk, d_t = a_1 ... a_t its decay until token t, and D_ts = d_t / d_s
the decay of what token s wrote until token t. Before token t writes, the memory is
d_t S + sum_{s<t} D_ts k_s w_s^T. So w_t depends on the tokens before it in the chunk, and the rows
w_t of W (C, Dv) solve a triangular system of equations. With the rows k, v, q, o in K, V, Q, O, and
with b, d and D multiplying element by element,

    (I + M) W = b V - b d K S    where M = tril(b D K K^T, -1)
    O = d Q S + tril(D Q K^T) W
    S <- d_C S + (D_C K)^T W     where D_C is the row of D for the last token

Keys and queries are scaled to norm 1, and queries then by 1 / sqrt(Dk). The memory, the decays and
the system of equations are in fp32; the other matmuls use the dtype of the activations.

Shapes: B batch, T time, N chunks, C tokens of a chunk, H key heads, G value heads for each key
head, Dk and Dv their dimensions.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
EPSILON = 1e-6  # added to the squared norm of queries and keys
NEVER = -1e4  # the log of a decay that leaves nothing in fp32; some chips have no inf


# --- token by token ------------------------------------------------------------------------------


def unit(x: Tensor) -> Tensor:
    """Return x in fp32, scaled to norm 1 along the last dimension."""
    x = x.float()
    squared_norm = (x * x).sum(dim=-1, keepdim=True)
    return x * torch.rsqrt(squared_norm + EPSILON)


def step(
    q: Tensor,  # (B, 1, H, Dk)
    k: Tensor,  # (B, 1, H, Dk)
    v: Tensor,  # (B, 1, H * G, Dv)
    log_decay: Tensor,  # (B, 1, H * G)
    strength: Tensor,  # (B, 1, H * G)
    memory: Tensor,  # (B, H * G, Dk, Dv) fp32
) -> tuple[Tensor, Tensor]:  # (B, 1, H * G, Dv) fp32, (B, H * G, Dk, Dv) fp32
    """Return what a token of each row reads, and the memory after it, computed in fp32.

    Vectors are rows here.
    """
    G = v.size(2) // k.size(2)
    q = unit(q) * q.size(3) ** -0.5
    q = q.transpose(1, 2).repeat_interleave(G, dim=1)  # (B, H * G, 1, Dk)
    k = unit(k).transpose(1, 2).repeat_interleave(G, dim=1)
    v = v.float().transpose(1, 2)  # (B, H * G, 1, Dv)
    a = log_decay.transpose(1, 2).unsqueeze(-1).exp()  # (B, H * G, 1, 1)
    b = strength.float().transpose(1, 2).unsqueeze(-1)
    S = memory * a
    w = (v - k @ S) * b  # (B, H * G, 1, Dv)
    S = S + k.mT @ w
    o = q @ S  # (B, H * G, 1, Dv)
    return o.transpose(1, 2), S


# --- chunk by chunk ------------------------------------------------------------------------------


class _Inverse(torch.autograd.Function):
    """Computes the inverses of I + M, where M is the strict lower triangle of a matrix (..., C, C).

    C is a power of two. The inverses of the diagonal blocks are joined in pairs, from 1 x 1 up to
    C x C:
        [[A, 0], [B, D]]^-1 = [[A^-1, 0], [-D^-1 B A^-1, D^-1]]
    This is as exact as substitution, with 2 log2 C batched matmuls instead of C steps.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        C = matrix.size(-1)  # entries on and above the diagonal are never read
        batch_shape = matrix.shape[:-2]
        inverses = matrix.new_ones(*batch_shape, C, 1, 1)  # (..., C / s, s, s) of the blocks
        s = 1
        while s < C:
            n = C // (2 * s)
            columns = matrix.unflatten(-1, (n, 2 * s))  # (..., C, n, 2s)
            grid = columns.unflatten(-3, (n, 2 * s))  # (..., n, 2s, n, 2s)
            pairs = grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)  # (..., n, 2s, 2s)
            below = pairs[..., s:, :s]  # (..., n, s, s)
            upper = inverses[..., 0::2, :, :]
            lower = inverses[..., 1::2, :, :]
            joined = matrix.new_zeros(*batch_shape, n, 2 * s, 2 * s)
            joined[..., :s, :s] = upper
            joined[..., s:, s:] = lower
            joined[..., s:, :s] = -(lower @ (below @ upper))
            inverses = joined
            s = 2 * s
        inverse = inverses.squeeze(-3)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        (grad,) = grads
        product = inverse.mT @ grad @ inverse.mT
        return -product.tril_(-1)  # only the strict lower triangle was read


class _Scan(torch.autograd.Function):
    """Takes the memory from chunk to chunk, and computes what the tokens of each chunk write.

    Matrices are batched over (B, H, G). For each chunk, with the memory S before it,

        W = U - R S
        S <- d S + K^T W

    The backward pass is written by hand, so that only two matmuls per chunk depend on the next
    chunk, and every gradient has the same layout as its tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        alone: Tensor,  # U (N, ..., C, Dv): what the tokens would write into an empty memory
        read_keys: Tensor,  # R (N, ..., C, Dk): with which they read what the memory has
        write_keys: Tensor,  # K (N, ..., C, Dk): with which they write, decayed to the chunk's end
        decays: Tensor,  # d (N, ..., 1, 1) fp32 of the memory over a chunk
        memory: Tensor,  # S (..., Dk, Dv) fp32 before the first chunk
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the memory S before each chunk, what each token writes (W), and the final memory.

        The memories are (N, ..., Dk, Dv) in the dtype of `alone`, the writes (N, ..., C, Dv), and
        the final memory (..., Dk, Dv) in fp32.
        """
        memories = []
        writes = []
        S = memory
        chunks = zip(
            alone.unbind(),
            read_keys.unbind(),
            write_keys.unbind(),
            decays.unbind(),
            strict=True,
        )
        for U, R, K, d in chunks:
            rounded = S.to(U.dtype)
            W = U - R @ rounded
            S = S * d + K.mT @ W
            memories.append(rounded)
            writes.append(W)
        all_memories = torch.stack(memories)
        all_writes = torch.stack(writes)
        ctx.save_for_backward(read_keys, write_keys, decays, all_memories, all_writes)
        return all_memories, all_writes, S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the arguments, from the last chunk to the first.

        With the gradients G of what forward() returns for a chunk, and grad_S of the memory after
        it, grad_W = G_W + K grad_S is also the gradient of U, and the memory before the chunk has
        the gradient d grad_S + G_S - R^T grad_W.
        """
        read_keys, write_keys, decays, memories, writes = ctx.saved_tensors
        grad_memories, grad_writes, grad_S = grads
        grads_after = []  # of the memory after each chunk, the last first
        grads_alone = []
        chunks = zip(
            read_keys.unbind(),
            write_keys.unbind(),
            decays.unbind(),
            grad_memories.unbind(),
            grad_writes.unbind(),
            strict=True,
        )
        for R, K, d, G_S, G_W in reversed(list(chunks)):
            grads_after.append(grad_S)
            grad_W = G_W + K @ grad_S.to(K.dtype)
            grad_S = grad_S * d + G_S - R.mT @ grad_W
            grads_alone.append(grad_W)
        grad_after = torch.stack(grads_after[::-1])
        grad_alone = torch.stack(grads_alone[::-1])
        # The other gradients need nothing of other chunks, and are computed for all of them at once.
        grad_read_keys = -(grad_alone @ memories.mT)
        grad_write_keys = writes @ grad_after.to(writes.dtype).mT
        grad_decays = (memories * grad_after).sum((-2, -1), keepdim=True)
        return grad_alone, grad_read_keys, grad_write_keys, grad_decays, grad_S


def _in_chunks(x: Tensor, chunks: int, size: int) -> Tensor:
    """Return x (B, T, H, ...) as chunks (N, B, H, C, ...), padded with zeros at the end."""
    padding = chunks * size - x.size(1)
    no_padding = (0, 0) * (x.dim() - 2)  # for the dimensions after T
    padded = F.pad(x, (*no_padding, 0, padding))
    split = padded.unflatten(1, (chunks, size))  # (B, N, C, H, ...)
    return split.movedim(1, 0).transpose(2, 3).contiguous()


def _visibility(documents: Tensor, chunks: int, size: int) -> tuple[Tensor, Tensor]:
    """Return two masks that keep tokens from seeing other documents in their row.

    The first says which tokens of its chunk each token sees, (N, B, 1, 1, C, C). The second says
    which tokens see the end of the chunk before their own, (N, B, 1, 1, C). `documents` is (B, T).
    """
    padding = chunks * size - documents.size(1)
    padded = F.pad(documents[None].float(), (0, padding), mode="replicate")[0]
    split = padded.unflatten(1, (chunks, size)).movedim(1, 0)  # (N, B, C)
    document = split[:, :, None, None]  # (N, B, 1, 1, C)
    first = document[:1, ..., :1]
    last_of_chunk_before = torch.cat((first, document[:-1, ..., -1:]))
    is_same = document[..., :, None] == document[..., None, :]  # (N, B, 1, 1, C, C)
    sees_before = document == last_of_chunk_before
    return is_same.tril(), sees_before


def _decays(
    log_decay: Tensor,  # (N, B, H, G, C) fp32 of each token
    documents: Tensor | None,  # (B, T)
) -> tuple[Tensor, Tensor]:
    """Return how much each token still sees of what was written before it, from 0 to 1.

    The first result, D, is for what each token of its chunk wrote, (N, B, H, G, C, C), and the
    second, d, for the memory before the chunk, (N, B, H, G, C). Other documents are not seen.
    """
    chunks = log_decay.size(0)
    size = log_decay.size(-1)
    since_begin = log_decay.cumsum(-1)  # log decay since the chunk began
    decay_before = since_begin.exp()
    sees = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril()
    if documents is not None:
        sees, sees_before = _visibility(documents, chunks, size)
        decay_before = decay_before * sees_before
    between = since_begin[..., :, None] - since_begin[..., None, :]  # (N, B, H, G, C, C)
    decay = between.masked_fill(~sees, NEVER).exp()
    return decay, decay_before


def chunked(
    q: Tensor,  # (B, T, H, Dk)
    k: Tensor,  # (B, T, H, Dk)
    v: Tensor,  # (B, T, H * G, Dv)
    log_decay: Tensor,  # (B, T, H * G) fp32, at most 0; 0 where a token is padding
    strength: Tensor,  # (B, T, H * G), from 0 to 1; 0 where a token is padding
    memory: Tensor | None = None,  # (B, H * G, Dk, Dv) fp32 before the first token; None: zeros
    documents: Tensor | None = None,  # (B, T) the document of each token, if a row holds several
    size: int = CHUNK,
) -> tuple[Tensor, Tensor]:  # (B, T, H * G, Dv) in the dtype of v, (B, H * G, Dk, Dv) fp32
    """Return what every token reads from the memory, and the memory after the last token.

    No token reads what another document wrote. The docstring of this file derives the equations.
    """
    B, T, H, Dk = k.shape
    Dv = v.size(3)
    G = v.size(2) // H
    N = -(-T // size)  # rounded up
    dtype = v.dtype
    Q = _in_chunks(unit(q) * Dk**-0.5, N, size)  # (N, B, H, C, Dk) fp32
    K = _in_chunks(unit(k), N, size)  # (N, B, H, C, Dk) fp32
    V = _in_chunks(v, N, size).unflatten(2, (H, G))  # (N, B, H, G, C, Dv)
    g = _in_chunks(log_decay.float(), N, size).unflatten(2, (H, G))  # (N, B, H, G, C)
    b = _in_chunks(strength.float(), N, size).unflatten(2, (H, G)).unsqueeze(-1)

    D, d = _decays(g, documents)
    d = d.unsqueeze(-1)  # (N, B, H, G, C, 1), and so is b

    # What the tokens write: W = U - R S, with (I + M) U = b V and (I + M) R = b d K.
    M = (K @ K.mT).unsqueeze(3) * D * b  # (N, B, H, G, C, C); _Inverse takes its lower triangle
    inverse = _Inverse.apply(M).to(dtype)
    U = inverse @ (V * b).to(dtype)  # (N, B, H, G, C, Dv)
    read_strength = d * b
    R = inverse @ (K.unsqueeze(3) * read_strength).to(dtype)  # (N, B, H, G, C, Dk)

    # The memory goes from chunk to chunk: S <- d_C S + (D_C K)^T W.
    D_C = D[..., -1, :, None]  # (N, B, H, G, C, 1)
    write_keys = (K.unsqueeze(3) * D_C).to(dtype)  # (N, B, H, G, C, Dk)
    d_C = d[..., -1:, :]  # (N, B, H, G, 1, 1)
    S = K.new_zeros(B, H, G, Dk, Dv) if memory is None else memory.unflatten(1, (H, G))
    scanned = _Scan.apply(U, R, write_keys, d_C, S)
    memories, W, S = cast(tuple[Tensor, Tensor, Tensor], scanned)

    # What the tokens read: O = d Q S + tril(D Q K^T) W. D is 0 above the diagonal.
    queries = (Q.unsqueeze(3) * d).to(dtype)  # (N, B, H, G, C, Dk)
    products = Q.to(dtype) @ K.to(dtype).mT  # (N, B, H, C, C)
    scores = (products.unsqueeze(3) * D).to(dtype)  # (N, B, H, G, C, C)
    reads = queries @ memories + scores @ W  # (N, B, H, G, C, Dv)
    by_row = reads.transpose(0, 1).flatten(2, 3)  # (B, N, H * G, C, Dv)
    o = by_row.transpose(2, 3).flatten(1, 2)  # (B, N * C, H * G, Dv)
    return o[:, :T], S.flatten(1, 2)
