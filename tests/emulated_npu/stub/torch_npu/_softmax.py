"""The arithmetic of the fused operators: attention as matmuls and a softmax, in fp32 on the CPU.

Shapes: B batch, S sequence, N heads, D head dimension, T tokens of all sequences, H = N * D.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torch_npu._operators import refuse

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")


@dataclass(frozen=True)
class Band:
    """The factor of the scores, and which keys a query sees apart from the mask."""

    scale: float
    mode: int  # sparse_mode
    before: int  # pre_tokens
    after: int  # next_tokens

    def hidden(self, queries: int, keys: int, masked: bool) -> Tensor | None:  # (queries, keys) True = not seen
        """The part of the mask that depends only on positions, for one sequence."""
        if not masked:
            return None  # without a mask, every mode is full attention
        place = torch.arange(queries)[:, None] + (keys - queries if self.mode in (3, 4) else 0)
        distance = place - torch.arange(keys)[None]
        if self.mode in (2, 3):
            return distance < 0
        if self.mode == 1:
            return None
        return (distance > self.before) | (distance < -self.after)


@dataclass(frozen=True)
class Sequences:
    """The layout of the tensors of a call, and the length of each sequence."""

    layout: str
    batch: int
    heads: int
    kv_heads: int
    width: int
    queries: int  # of the longest sequence
    keys: int
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]

    @staticmethod
    def of(
        name: str, q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int, layout: str,
        q_ends: Any = None, k_ends: Any = None,
    ) -> "Sequences":  # fmt: skip
        """Read the shapes. For TND, the ends are cumulative lengths without the leading 0."""
        if layout not in LAYOUTS:
            refuse(name, f"input_layout must be one of {LAYOUTS}, got {layout!r}")
        if q.dim() != (3 if layout in ("BSH", "SBH", "TND") else 4) or k.dim() != q.dim() or k.shape != v.shape:
            refuse(name, f"shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)} do not fit layout {layout}")
        n = layout.find("N")
        q_heads = q.size(n) if n >= 0 else heads
        k_heads = k.size(n) if n >= 0 else kv_heads or k.size(-1) * heads // q.size(-1)
        width = q.size(-1) if n >= 0 else q.size(-1) // heads
        if q_heads != heads or (kv_heads and k_heads != kv_heads) or k_heads == 0 or q_heads % k_heads:
            refuse(name, f"the tensors must have {heads} and {kv_heads} heads, as given, got {q_heads} and {k_heads}")
        if (k.size(-1) if n >= 0 else k.size(-1) // k_heads) != width:
            refuse(name, "the heads of query and key must have the same width")
        if layout == "TND":
            q_lengths, k_lengths = _lengths(name, q_ends, q.size(0)), _lengths(name, k_ends, k.size(0))
            if len(q_lengths) != len(k_lengths) or len(q_lengths) > 1024:
                refuse(
                    name,
                    "query and key must have equally many sequences, at most 1024, got "
                    f"{len(q_lengths)} and {len(k_lengths)}",
                )
        else:
            batch, q_long, k_long = q.size(layout.find("B")), q.size(layout.find("S")), k.size(layout.find("S"))
            if k.size(layout.find("B")) != batch:
                refuse(name, "query and key must have the same batch size")
            q_lengths, k_lengths = (q_long,) * batch, (k_long,) * batch
        return Sequences(
            layout, len(q_lengths), heads, k_heads, width, max(q_lengths), max(k_lengths), q_lengths, k_lengths
        )

    def with_lengths(self, name: str, queries: list[int] | None, keys: list[int] | None) -> "Sequences":
        """Use only this many queries and keys of each sequence."""
        changed = self
        for field, given, longest in (("q_lengths", queries, self.queries), ("k_lengths", keys, self.keys)):
            if given is None:
                continue
            if isinstance(given, Tensor):
                refuse(name, "lengths must be a list of numbers, got a tensor")
            lengths = tuple(int(n) for n in given) * (self.batch if len(given) == 1 else 1)
            if len(lengths) != self.batch or any(not 0 <= n <= longest for n in lengths):
                refuse(name, f"there must be {self.batch} lengths from 0 to {longest}, got {given}")
            changed = replace(changed, **{field: lengths})  # type: ignore[arg-type]
        return changed

    def split(self, x: Tensor, heads: int, lengths: tuple[int, ...]) -> list[Tensor]:
        """The sequences of a tensor, each (N, S, D) in fp32, only the part that is used."""
        x = x.float()
        if self.layout == "TND":
            return [part.transpose(0, 1) for part in x.split(list(lengths))]
        if self.layout in ("BSH", "SBH"):
            x = x.unflatten(-1, (heads, self.width))
        order = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}[self.layout]
        return [row[:, :n] for row, n in zip(x.permute(order), lengths, strict=True)]

    def join(self, parts: list[Tensor], shape: torch.Size) -> Tensor:
        """Put sequences (N, S, D) back into the layout, with zeros where nothing was used."""
        if self.layout == "TND":
            return torch.cat([part.transpose(0, 1) for part in parts])
        long = shape[self.layout.find("S")]
        rows = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, long - part.size(1))) for part in parts])
        order = {"BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}[self.layout]
        return rows.permute(order).reshape(shape)


def _lengths(name: str, ends: Any, tokens: int) -> tuple[int, ...]:
    if ends is None or isinstance(ends, Tensor):
        refuse(name, "layout TND needs lists of cumulative lengths")
    lengths = tuple(end - start for start, end in zip([0, *ends], ends, strict=False))
    if not ends or min(lengths) < 0 or ends[-1] != tokens:
        refuse(name, f"cumulative lengths must rise to {tokens}, the number of tokens, got {ends}")
    return lengths


@lru_cache(maxsize=1)
def _above_diagonal() -> Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, row: int, plan: Sequences, band: Band) -> Tensor:
    """The scores (N, S, K) of a sequence in fp32, -inf where a key is hidden; k has as many heads as q."""
    scores = (q @ k.mT).mul_(band.scale)
    hidden = band.hidden(q.size(1), k.size(1), mask is not None)
    if hidden is not None and bool(hidden.any()):
        scores.masked_fill_(hidden, float("-inf"))
    if mask is not None and band.mode < 2:
        part = mask.bool()
        if part.dim() == 4:
            part = part[row if part.size(0) > 1 else 0]
        elif part.dim() == 3:
            part = part[row if part.size(0) > 1 else 0][None]
        part = part[..., : q.size(1) if part.size(-2) > 1 else 1, : k.size(1)]
        scores.masked_fill_(part, float("-inf"))
    return scores


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, plan: Sequences, band: Band
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention, and the maximum and the sum of each query's softmax, (B, N, S, 8) or (T, N, 8)."""
    if band.mode >= 2 and mask is not None and not torch.equal(mask.bool(), _above_diagonal()):
        refuse("attention", "the mask of sparse_mode 2, 3 and 4 must be True exactly above the diagonal")
    groups = plan.heads // plan.kv_heads
    outs, tops, totals = [], [], []
    rows = zip(plan.split(q, plan.heads, plan.q_lengths), plan.split(k, plan.kv_heads, plan.k_lengths),
               plan.split(v, plan.kv_heads, plan.k_lengths), strict=True)  # fmt: skip
    for row, (query, key, value) in enumerate(rows):
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
        scores = _scores(query, key, mask, row, plan, band)
        top = scores.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weights = scores.sub_(top).exp_()
        total = weights.sum(dim=-1, keepdim=True)
        outs.append((weights @ value) / total.clamp_min(1e-30))  # a query that sees no key gets zeros
        tops.append(top)
        totals.append(total)
    return plan.join(outs, q.shape), _statistics(tops, plan), _statistics(totals, plan)


def _statistics(parts: list[Tensor], plan: Sequences) -> Tensor:
    if plan.layout == "TND":
        return torch.cat([part.transpose(0, 1) for part in parts]).expand(-1, -1, 8).contiguous()
    pad = torch.nn.functional.pad
    return torch.stack([pad(part, (0, 0, 0, plan.queries - part.size(1))) for part in parts]).expand(-1, -1, -1, 8)


def attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, out: Tensor, top: Tensor, total: Tensor,
    *, plan: Sequences, band: Band,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v, from what the forward pass saved."""
    groups = plan.heads // plan.kv_heads
    rows = zip(plan.split(gradient, plan.heads, plan.q_lengths), plan.split(out, plan.heads, plan.q_lengths),
               plan.split(q, plan.heads, plan.q_lengths), plan.split(k, plan.kv_heads, plan.k_lengths),
               plan.split(v, plan.kv_heads, plan.k_lengths), strict=True)  # fmt: skip
    if plan.layout == "TND":
        tops, totals = ([part.transpose(0, 1) for part in x.split(list(plan.q_lengths))] for x in (top, total))
    else:
        tops, totals = ([part[:, :n] for part, n in zip(x, plan.q_lengths, strict=True)] for x in (top, total))
    grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for row, (towards, output, query, key, value) in enumerate(rows):
        key, value = (x.repeat_interleave(groups, dim=0) for x in (key, value))
        weights = _scores(query, key, mask, row, plan, band).sub_(tops[row][..., :1]).exp_()
        weights /= totals[row][..., :1].clamp_min(1e-30)
        v_grad = weights.mT @ towards
        slope = towards @ value.mT
        slope -= (towards * output).sum(dim=-1, keepdim=True)
        slope *= weights
        grads[0].append(slope @ key * band.scale)
        for place, part in ((1, slope.mT @ query * band.scale), (2, v_grad)):
            grads[place].append(part.unflatten(0, (plan.kv_heads, groups)).sum(dim=1))
    return plan.join(grads[0], q.shape), plan.join(grads[1], k.shape), plan.join(grads[2], v.shape)
