"""Trains on replies as trees, in which replies to the same prompt share their common tokens.

The gradient is the same as for separate rows, up to rounding. A tree predicts only tokens that are
trained. If the weights of a token cancel over the replies that share it, the token is not
trained.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device
from nanochat.common import UserError, tr
from nanochat.context import Context, trailing
from nanochat.device import Compute
from nanochat.engine import Completion
from nanochat.model import Model
from nanochat.runtime import parallel

MOST_TREE_TOKENS = 384  # larger groups are split, as the cost of attention is quadratic
PASS_TOKENS = 4096  # most tokens in a pass without gradients, padding included
LEAST_ROW_TOKENS = 128
# Lengths of rows, and numbers of rows and targets in a pass, are multiples of these, to keep the
# number of shapes small.
TOKEN_GRAIN = 32
ROW_GRAIN = 4
TARGET_GRAIN = 64
ROUNDING_ERROR = 1e-9  # a sum of weights up to this is 0
IGNORED = -1  # a target that is not trained

# Where several replies have the same token at the same place of a tree, one target can train it with
# the sum of their weights: of all of them, of those with the same sign, or of one reply only.
Summed = Literal["all", "same sign", "same reply"]
# A clipped ratio is linear only in weights of one sign, and GSPO's ratio is that of a whole reply.
# CISPO is linear, but its figures count targets even if their weights would cancel out.
SUMMED: dict[str, Summed] = {
    "reinforce": "all",
    "cispo": "same sign",
    "ppo": "same sign",
    "gspo": "same reply",
}


@dataclass(frozen=True)
class Sample:
    """A reply with its prompt, and with the weight of each of its tokens in the loss."""

    prompt: list[int]
    completion: Completion
    weights: list[float]
    # if equal replies were merged: the number of replies for which each token is trained
    counted: list[int] | None = None

    @property
    def copies(self) -> list[int]:
        """For each token of the reply, the number of replies for which it is trained."""
        if self.counted is not None:
            return self.counted
        return [int(weight != 0) for weight in self.weights]

    @property
    def length(self) -> int:
        """The number of tokens of prompt and reply together."""
        return len(self.prompt) + len(self.completion.tokens)


def over_trees(requested: bool | None, model: Model, compute: Compute) -> bool:
    """Return whether to sample and train on replies as trees.

    If `requested` is None, the platform decides, provided that the model can read trees. Raises
    UserError (exit code 2) if trees are requested and the model cannot read them.
    """
    if requested and not model.takes_trees:
        raise UserError(
            tr(
                "--trees was asked for, but this family of models reads rows only. Leave "
                "--trees out"
            ),
            exit_code=2,
        )
    if not model.takes_trees:
        return False
    return compute.platform.prefers_trees if requested is None else requested


# --- the context of a pass over trees ------------------------------------------------------------


class Tree(Context):
    """The context of rows whose tokens form trees, where sequences share a common beginning.

    A row may hold several trees, and padding tokens that see only themselves.
    """

    def __init__(
        self,
        parents: Tensor,  # (B, T) index in its row of each token's parent; a root is its own parent
        visible: Tensor,  # (B, T, T) bool, True where a token (dim 1) sees another (dim 2)
        targets_at: Tensor,  # (N,) index in the flattened rows of the token that predicts a target
    ):
        self.parents = parents
        self.seen = visible
        self.targets_at = targets_at
        self.positions: Tensor = visible.sum(dim=2) - 1
        self._masks: dict[int, Tensor] = {}  # window -> (B, 1, T, T) True where a query sees a key

    def previous(self, x: Tensor) -> Tensor:
        """Return the entry of x for the parent of each token, and 0 for a root."""
        begins = self.parents == torch.arange(self.parents.size(1), device=self.parents.device)
        parents = trailing(self.parents, x).expand_as(x)
        return x.gather(1, parents).masked_fill(trailing(begins, x), 0)

    def previous_keys(self, layer: int, k: Tensor) -> Tensor:
        """Return the key of each token's parent, and 0 for a root."""
        return self.previous(k.flatten(2)).view_as(k)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None
    ) -> Tensor:
        """Compute attention along the path from the root to each token, within the window."""
        if window not in self._masks:
            near = self.positions[:, :, None] - self.positions[:, None] <= window
            self._masks[window] = (self.seen & near)[:, None]
        return self.attention.masked(q, k, v, self._masks[window], scale)


# the names in a micro-batch of the tensors of a Tree, in the order of its arguments
TREE = ("parents", "seen", "targets_at")


def model_arguments(extras: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the keyword arguments with which a model takes the extra tensors of a micro-batch.

    The tensors named in TREE become a Tree. Others, such as `weights`, are passed on unchanged.
    """
    arguments: dict[str, Any] = {name: extras[name] for name in extras if name not in TREE}
    if TREE[0] in extras:
        arguments["context"] = Tree(*(extras[name] for name in TREE))
    return arguments


# --- growing -------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A token that is trained after a place of a tree; replies with equal targets share it."""

    place: int  # the index in the tree of the token that predicts it
    token: int
    group: int  # 0; or whether the weight is positive; or the index of the reply; see Summed


@dataclass
class TargetSums:
    """The weight and the number of copies of a target, summed over the replies that share it."""

    weight: float
    logprob: float  # the sampler's, as recorded in the first of these replies
    copies: float


@dataclass
class GrowingTree:
    """A tree of the tokens of a prompt and its replies; a place is an index into `tokens`."""

    tokens: list[int]
    parents: list[int]
    # (place, next token) -> the place of that token
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    targets: dict[Target, TargetSums] = field(default_factory=dict)
    replies: int = 0  # number of replies that were added

    def add(self, sample: Sample, summed: Summed) -> list[Target]:
        """Add a reply, and return the targets of its tokens.

        Only targets with a nonzero weight are added to `targets`.
        """
        path = []
        place = len(sample.prompt) - 1
        reply = sample.completion
        of_tokens = zip(reply.tokens, sample.weights, reply.logprobs, sample.copies, strict=True)
        for token, weight, logprob, copies in of_tokens:
            target = Target(place, token, self._group(weight, summed))
            path.append(target)
            if weight:
                sums = self.targets.setdefault(target, TargetSums(0.0, logprob, 0.0))
                sums.weight += weight
                sums.copies += copies
            place = self._child(place, token)
        self.replies += 1
        return path

    def _group(self, weight: float, summed: Summed) -> int:
        """Return the group of a target of the reply that is being added."""
        if summed == "same reply":
            return self.replies
        return int(weight > 0) if summed == "same sign" else 0

    def _child(self, place: int, token: int) -> int:
        """Return the place of a token that follows `place`, adding it to the tree if necessary."""
        child = self.children.get((place, token))
        if child is None:
            child = len(self.tokens)
            self.children[place, token] = child
            self.tokens.append(token)
            self.parents.append(place)
        return child

    def pruned(self) -> "GrowingTree":
        """Return a copy with only those targets whose weight is not 0, and the tokens they need."""
        targets = {
            target: sums
            for target, sums in self.targets.items()
            if abs(sums.weight) > ROUNDING_ERROR
        }
        needed = [False] * len(self.tokens)
        for target in targets:
            needed[target.place] = True
        for place in range(len(self.tokens) - 1, 0, -1):
            if needed[place]:
                needed[self.parents[place]] = True
        new_places = (np.cumsum(needed) - 1).tolist()
        places = np.flatnonzero(needed).tolist()
        return GrowingTree(
            [self.tokens[place] for place in places],
            [new_places[self.parents[place]] for place in places],
            targets={
                target._replace(place=new_places[target.place]): sums
                for target, sums in targets.items()
            },
            replies=self.replies,
        )


def _plant(samples: Sequence[Sample], summed: Summed) -> list[tuple[GrowingTree, list[Target]]]:
    """Return, for each sample, its tree and the targets of its tokens in that tree.

    All replies in a tree have the same prompt. A new tree begins if the last one for this prompt
    could grow beyond 384 tokens.
    """
    planted = []
    latest: dict[tuple[int, ...], GrowingTree] = {}
    for sample in samples:
        key = tuple(sample.prompt)
        tree = latest.get(key)
        if tree is None or len(tree.tokens) + len(sample.completion.tokens) > MOST_TREE_TOKENS:
            prompt = list(sample.prompt)
            tree = GrowingTree(prompt, [0, *range(len(prompt) - 1)])
            latest[key] = tree
        planted.append((tree, tree.add(sample, summed)))
    return planted


def _distinct(planted: Sequence[tuple[GrowingTree, list[Target]]]) -> list[GrowingTree]:
    return list({id(tree): tree for tree, _ in planted}.values())


def grow(samples: Sequence[Sample], summed: Summed) -> list[GrowingTree]:
    """Return the pruned trees of all samples, leaving out trees that have no target to train."""
    trained = [sample for sample in samples if any(sample.weights)]
    trees = [tree.pruned() for tree in _distinct(_plant(trained, summed))]
    return [tree for tree in trees if tree.targets]


# --- reading -------------------------------------------------------------------------------------


@torch.no_grad()
def logprobs(samples: Sequence[Sample], model: Model, compute: Compute) -> list[list[float]]:
    """Return, for each sample, the model's log-probability of every token of the reply.

    The model reads the replies as trees.
    """
    every_token = [
        replace(sample, weights=[1.0] * len(sample.completion.tokens)) for sample in samples
    ]
    planted = _plant(every_token, "all")
    rows, row_tokens = _pack_rows(_distinct(planted))
    losses: dict[tuple[int, Target], float] = {}
    height = max(PASS_TOKENS // row_tokens // ROW_GRAIN, 1) * ROW_GRAIN
    for first in range(0, len(rows), height):
        pass_rows = rows[first : first + height]
        tensors = _pass_tensors(pass_rows, row_tokens, height, pad=0)
        names = ("inputs", "targets", *TREE)
        inputs, targets, *of_tree = (tensors[name].to(compute.device) for name in names)
        module = cast(nn.Module, model)
        pass_losses = module(inputs, targets, "none", context=Tree(*of_tree)).tolist()
        keys = [(id(tree), target) for row in pass_rows for tree in row for target in tree.targets]
        losses |= zip(keys, pass_losses, strict=False)  # the remaining targets are padding
    return [[-losses[id(tree), target] for target in path] for tree, path in planted]


# --- packing -------------------------------------------------------------------------------------


def pack(
    samples: Sequence[Sample],
    replies: int,
    pad: int,
    compute: Compute,
    summed: Summed,
    extras: Sequence[str],
) -> list[tuple[Tensor, ...]]:
    """Return inputs, targets and `extras` of each pass over the samples, arranged as trees.

    The extras are `weights`; `sampled`, the sampler's log-probabilities; `copies`, the number of
    replies for which each target is trained; `replies`, the index of each target's reply if
    `summed` is "same reply"; and the names in TREE.

    A pass has at most as many tokens as `replies` rows of the longest sample, or a single row.
    Every rank gets the same number of passes.
    """
    rows, row_tokens = _pack_rows(grow(samples, summed))
    longest = max((sample.length for sample in samples), default=1)
    most_rows = max(replies * longest // row_tokens, 1)
    packed = []
    for number in range(most_passes(len(rows), most_rows, compute)):
        pass_rows = rows[number * most_rows : (number + 1) * most_rows]
        tensors = _pass_tensors(pass_rows, row_tokens, most_rows, pad)
        names = ("inputs", "targets", *extras)
        packed.append(tuple(device.pin(tensors[name], compute) for name in names))
    return packed


def most_passes(rows: int, pass_rows: int, compute: Compute) -> int:
    """Return how many passes the rank with the most rows needs; every rank must call this."""
    counts = [0.0] * compute.world_size
    counts[compute.rank] = float(-(-rows // pass_rows))
    return int(max(parallel.total(counts, compute)))


def _pack_rows(trees: Sequence[GrowingTree]) -> tuple[list[list[GrowingTree]], int]:
    """Arrange trees in rows, and return the rows and the number of tokens in each.

    The largest trees are placed first, and each goes into the first row that has room for it.
    """
    trees = sorted(trees, key=lambda tree: -len(tree.tokens))
    largest = len(trees[0].tokens) if trees else 0
    row_tokens = max(largest, LEAST_ROW_TOKENS)
    row_tokens = -(-row_tokens // TOKEN_GRAIN) * TOKEN_GRAIN
    rows: list[list[GrowingTree]] = []
    room_left: list[int] = []
    for tree in trees:
        size = len(tree.tokens)
        fitting = (number for number, room in enumerate(room_left) if room >= size)
        number = next(fitting, len(rows))
        if number == len(rows):
            rows.append([])
            room_left.append(row_tokens)
        rows[number].append(tree)
        room_left[number] -= size
    return rows, row_tokens


class PassTarget(NamedTuple):
    """A target of a pass; its position is that of the token which predicts it, over all rows."""

    position: int
    token: int
    weight: float
    logprob: float
    copies: float
    reply: int  # the index of the reply in the pass, if groups are replies


PADDING = PassTarget(0, IGNORED, 0.0, 0.0, 0.0, 0)


def _pass_tensors(
    rows: Sequence[Sequence[GrowingTree]], row_tokens: int, most_rows: int, pad: int
) -> dict[str, Tensor]:
    """Return the tensors of one pass by name: inputs, targets, and all extras of pack()."""
    height = min(max(-(-len(rows) // ROW_GRAIN), 1) * ROW_GRAIN, most_rows)
    inputs = np.full((height, row_tokens), pad, dtype=np.int64)
    parents = np.tile(np.arange(row_tokens), (height, 1))
    visible = np.tile(np.eye(row_tokens, dtype=bool), (height, 1, 1))
    targets: list[PassTarget] = []
    replies_before = 0
    for number, row in enumerate(rows):
        start = 0
        for tree in row:
            end = start + len(tree.tokens)
            inputs[number, start:end] = tree.tokens
            parents[number, start:end] = np.array(tree.parents) + start
            _see_ancestors(visible[number], tree.parents, start)
            first = number * row_tokens + start
            for target, sums in tree.targets.items():
                pass_target = PassTarget(
                    position=first + target.place,
                    token=target.token,
                    weight=sums.weight,
                    logprob=sums.logprob,
                    copies=sums.copies,
                    reply=replies_before + target.group,
                )
                targets.append(pass_target)
            start = end
            replies_before += tree.replies
    count = max(-(-len(targets) // TARGET_GRAIN), 1) * TARGET_GRAIN
    targets += [PADDING] * (count - len(targets))
    columns = [torch.tensor(column) for column in zip(*targets, strict=True)]
    positions, tokens, weights, sampled, copies, replies = columns
    return {
        "inputs": torch.from_numpy(inputs),
        "targets": tokens,
        "weights": weights,
        "sampled": sampled,
        "copies": copies,
        "replies": replies,
        "parents": torch.from_numpy(parents),
        "seen": torch.from_numpy(visible),
        "targets_at": positions,
    }


def _see_ancestors(visible: np.ndarray, parents: Sequence[int], start: int) -> None:
    """Let each token of a tree see its ancestors, in the (T, T) mask `visible`.

    The tree begins at index `start` of the mask, in which each token already sees itself.
    """
    for place, parent in enumerate(parents[1:], 1):
        row = start + place
        visible[row, start:row] = visible[start + parent, start:row]
