"""Trains on replies as trees: a prompt, and what several replies to it begin with, is one run of tokens for all.

The gradient is that of separate rows, up to rounding. A tree predicts only tokens that are trained, and a token that
better and worse replies share with opposite weights drops out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device
from nanochat.common import UserError
from nanochat.context import Tree
from nanochat.device import Compute
from nanochat.engine import Completion
from nanochat.model import Model
from nanochat.runtime import parallel

LARGEST = 384  # tokens of a tree: attention costs the square, so larger groups become several trees
PASS_TOKENS = 4096  # of a pass that only reads, padding included
ROW = 128  # tokens of a row, if no tree is larger
GRAIN, TARGETS = (
    4,
    64,
)  # passes have multiples of so many rows and targets, so that few shapes occur
NOTHING = 1e-9  # a sum of weights below this is what rounding has left

# Which targets of a place are not summed: those of weights that differ in sign, or those of different replies.
Apart = Literal["none", "signs", "replies"]
Target = tuple[
    int, int, int
]  # the place that predicts it, its token, what is kept apart: a sign, a reply's number
# Losses with ratios have figures, which count targets whose weights would cancel each other
APART: dict[str, Apart] = {"reinforce": "none", "cispo": "signs", "ppo": "signs", "gspo": "replies"}


@dataclass(frozen=True)
class Sample:
    """One reply: the tokens of prompt and reply, each reply token's weight in the loss, and how likely it was."""

    prompt: list[int]
    completion: Completion
    weights: list[float]
    counted: list[int] | None = (
        None  # for how many replies each token is trained, where equal ones were merged
    )

    @property
    def copies(self) -> list[int]:
        """For how many replies each token of the reply is trained."""
        return (
            [int(weight != 0) for weight in self.weights] if self.counted is None else self.counted
        )


def over_trees(wanted: bool | None, model: Model, compute: Compute) -> bool:
    """Whether replies are sampled and trained as trees; `wanted` None means: on CPUs, where the model can read trees.

    UserError (code 2) if it is wanted and not possible.
    """
    if wanted and not model.takes_trees:
        raise UserError(
            "--trees was asked for, but this family of models reads rows only. Leave --trees out", 2
        )
    return model.takes_trees and (compute.platform.is_host if wanted is None else wanted)


@dataclass
class _Growing:
    """A tree: its tokens, and the targets that places of the tree predict."""

    tokens: list[int]
    parents: list[int]
    children: dict[tuple[int, int], int] = field(
        default_factory=dict
    )  # place, token -> the token's place
    targets: dict[Target, list[float]] = field(
        default_factory=dict
    )  # weight, log-probability, copies
    replies: int = 0  # number of replies that were added

    def add(self, sample: Sample, apart: Apart) -> list[Target]:
        """Add a reply; the targets that its tokens are, in `targets` if they weigh anything."""
        keys = []
        at, reply = len(sample.prompt) - 1, sample.completion
        trained = zip(reply.tokens, sample.weights, reply.logprobs, sample.copies, strict=True)
        for token, weight, logprob, copies in trained:
            kept = {"none": 0, "signs": int(weight > 0), "replies": self.replies}[apart]
            keys.append((at, token, kept))
            if weight:
                target = self.targets.setdefault(keys[-1], [0.0, logprob, 0.0])
                target[0] += weight
                target[2] += copies
            child = self.children.get((at, token))
            if child is None:
                child = self.children[at, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(at)
            at = child
        self.replies += 1
        return keys

    def pruned(self) -> "_Growing":
        """The tree without targets that weigh nothing, and without tokens that no target needs."""
        targets = {key: value for key, value in self.targets.items() if abs(value[0]) > NOTHING}
        needed = [False] * len(self.tokens)
        for place, _, _ in targets:
            needed[place] = True
        for place in range(len(self.tokens) - 1, 0, -1):
            if needed[place]:
                needed[self.parents[place]] = True
        numbers = (np.cumsum(needed) - 1).tolist()
        kept = [place for place, wanted in enumerate(needed) if wanted]
        return _Growing(
            [self.tokens[place] for place in kept],
            [numbers[self.parents[place]] for place in kept],
            targets={
                (numbers[place], token, kept): value
                for (place, token, kept), value in targets.items()
            },
            replies=self.replies,
        )


def _planted(samples: Sequence[Sample], apart: Apart) -> list[tuple[_Growing, list[Target]]]:
    """Each sample's tree, which has one prompt, and the targets that the sample's tokens are in it."""
    planted = []
    latest: dict[tuple[int, ...], _Growing] = {}
    for sample in samples:
        key = tuple(sample.prompt)
        tree = latest.get(key)
        if tree is None or len(tree.tokens) + len(sample.completion.tokens) > LARGEST:
            tree = latest[key] = _Growing(list(sample.prompt), [0, *range(len(sample.prompt) - 1)])
        planted.append((tree, tree.add(sample, apart)))
    return planted


def grow(samples: Sequence[Sample], apart: Apart) -> list[_Growing]:
    """Trees of all samples, each of one prompt; trees that train nothing are left out."""
    grown = _distinct(_planted([sample for sample in samples if any(sample.weights)], apart))
    return [tree for each in grown if (tree := each.pruned()).targets]


def _distinct(planted: Sequence[tuple[_Growing, list[Target]]]) -> list[_Growing]:
    return list({id(tree): tree for tree, _ in planted}.values())


@torch.no_grad()
def logprobs(samples: Sequence[Sample], model: Model, compute: Compute) -> list[list[float]]:
    """The model's log-probability of each token of each sample's reply, read as trees."""
    planted = _planted(
        [replace(each, weights=[1.0] * len(each.completion.tokens)) for each in samples], "none"
    )
    rows, T = _packed(_distinct(planted))
    known: dict[tuple[int, Target], float] = {}
    height = max(PASS_TOKENS // T // GRAIN, 1) * GRAIN
    for first in range(0, len(rows), height):
        part = rows[first : first + height]
        tensors = [
            tensor.to(compute.device) for tensor in _pass(part, T, height, 0, "none", sampled=False)
        ]
        inputs, targets, _, *shape = tensors
        losses = cast(nn.Module, model)(inputs, targets, "none", context=Tree(*shape)).tolist()
        keys = [(id(tree), target) for row in part for tree in row for target in tree.targets]
        known |= zip(keys, losses, strict=False)  # behind them come targets that fill up the pass
    return [[-known[id(tree), target] for target in path] for tree, path in planted]


def pack(
    samples: Sequence[Sample], replies: int, pad: int, compute: Compute, apart: Apart, sampled: bool
) -> list[tuple[Tensor, ...]]:
    """Samples as passes of inputs, targets, weights, with `sampled` the sampler's log-probabilities and for how many
    replies each target is trained, and a Tree.

    A pass has at most as many tokens as `replies` rows of the longest sample. Every rank gets the same number of
    passes. `apart` keeps weights apart in which the loss is not linear; for "replies", the number of each target's
    reply comes before the Tree.
    """
    rows, T = _packed(grow(samples, apart))
    longest = max(
        (len(sample.prompt) + len(sample.completion.tokens) for sample in samples), default=1
    )
    most = max(replies * longest // T, 1)
    counts = [0.0] * compute.world_size
    counts[compute.rank] = float(-(-len(rows) // most))
    passes = int(max(parallel.total(counts, compute)))
    filled = (
        _pass(rows[i * most : (i + 1) * most], T, most, pad, apart, sampled) for i in range(passes)
    )
    return [tuple(device.pin(tensor, compute) for tensor in tensors) for tensors in filled]


def _packed(trees: Sequence[_Growing]) -> tuple[list[list[_Growing]], int]:
    """Trees, the largest first, in the first row that has room for them; and the tokens of a row."""
    trees = sorted(trees, key=lambda tree: -len(tree.tokens))
    T = max(len(trees[0].tokens) if trees else 0, ROW)
    T = -(-T // 32) * 32
    rows: list[list[_Growing]] = []
    left: list[int] = []
    for tree in trees:
        size = len(tree.tokens)
        at = next((number for number, room in enumerate(left) if room >= size), len(rows))
        if at == len(rows):
            rows.append([])
            left.append(T)
        rows[at].append(tree)
        left[at] -= size
    return rows, T


def _pass(
    rows: Sequence[Sequence[_Growing]], T: int, most: int, pad: int, apart: Apart, sampled: bool
) -> list[Tensor]:
    """The tensors of one pass, as pack() orders them."""
    height = min(max(-(-len(rows) // GRAIN), 1) * GRAIN, most)
    inputs = np.full((height, T), pad, dtype=np.int64)
    parents = np.tile(np.arange(T), (height, 1))
    seen = np.tile(np.eye(T, dtype=bool), (height, 1, 1))
    found: list[
        tuple[int, int, float, float, float, int]
    ] = []  # place, target, weight, log-probability, copies, reply
    before = 0  # replies
    for number, row in enumerate(rows):
        start = 0
        for tree in row:
            end = start + len(tree.tokens)
            inputs[number, start:end] = tree.tokens
            parents[number, start:end] = np.array(tree.parents) + start
            here = seen[number]
            for place, parent in enumerate(tree.parents[1:], 1):
                here[start + place, start : start + place] = here[
                    start + parent, start : start + place
                ]
            first = number * T + start
            for (at, token, kept), value in tree.targets.items():
                found.append((first + at, token, value[0], value[1], value[2], before + kept))
            start, before = end, before + tree.replies
    count = max(-(-len(found) // TARGETS), 1) * TARGETS
    found += [(0, -1, 0.0, 0.0, 0.0, 0)] * (count - len(found))
    columns = (torch.tensor(column) for column in zip(*found, strict=True))
    places, targets, weights, logprobs, copies, replies = columns
    own: list[Any] = [torch.from_numpy(inputs), targets, weights]
    own += [logprobs, copies] if sampled else []
    own += [replies] if apart == "replies" else []
    return [*own, torch.from_numpy(parents), torch.from_numpy(seen), places]
