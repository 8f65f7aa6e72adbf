"""Samples replies from the current model, grades them, and turns them into weighted rows to train on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanochat import device
from nanochat.common import UserError, tr, warn
from nanochat.context import TREE
from nanochat.data.conversation import Task
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.evals.chat import generate_and_judge, grader
from nanochat.generate.sampling import Sampling
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer
from nanochat.train.rl.anchor import anchored
from nanochat.train.rl.groups import Groups
from nanochat.train.rl.policy import (
    PolicyFlags,
    advantages,
    averaged,
    shaped,
    shuffled,
    token_weights,
)
from nanochat.train.rl.trees import APART, Sample, pack

ROUND = 32  # rows are padded to a multiple of this many tokens, so that few shapes occur

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Rollouts:
    """A step's samples of one rank, and figures over all ranks."""

    # inputs, targets, weights and, for a ratio, sampled and copies, (b, T) each; over trees as trees.pack() makes them
    micro_batches: list[tuple[Tensor, ...]]
    num_targets: int  # tokens that are trained, over all ranks
    reward: float  # mean over all samples
    length: float  # mean tokens of a reply
    entropy: (
        float  # mean of -log p of the chosen tokens: an estimate of the policy's entropy in nats
    )
    flat: float  # share of prompts whose samples all did equally well
    truncated: float  # share of samples that were cut off
    extras: tuple[str, ...] = ("weights",)  # what a micro-batch holds after inputs and targets
    kl: float | None = (
        None  # estimate of the policy's divergence from the reference, in nats a token that is trained
    )

    def __str__(self) -> str:
        return (
            f"reward: {self.reward:.3f} | length: {self.length:.1f} | entropy: {self.entropy:.3f} | "
            f"equal groups: {self.flat:.0%} | cut off: {self.truncated:.0%}"
            + ("" if self.kl is None else f" | kl: {self.kl:.4f}")
        )

    def figures(self) -> dict[str, float]:
        """The figures for metrics.jsonl."""
        names = (
            "reward",
            "length",
            "entropy",
            "flat",
            "truncated",
            *(() if self.kl is None else ("kl",)),
        )
        return {name: getattr(self, name) for name in names}


def task_key(task: Task) -> str:
    """A name for the problems of a task: other problems, another name."""
    digest = hashlib.sha256()
    for number in range(len(task)):
        digest.update(repr(task[number]).encode())
    return f"{task.name} {len(task)} {digest.hexdigest()[:16]}"


def fitting(task: Task, tokenizer: Tokenizer, context: int) -> list[int]:
    """The problems of a task that a context of so many tokens holds, with room for a reply; a warning if some are left
    out, and a UserError if all are."""
    numbers = [i for i in range(len(task)) if len(tokenizer.render_prompt(task[i])) < context]
    if not numbers:
        raise UserError(
            tr(
                "no problem of {task} fits into the model's context of {context:,} tokens. Shorten the problems, or "
                "train a model with a larger --max_seq_len",
                task=task.name,
                context=context,
            )
        )
    if left_out := len(task) - len(numbers):
        warn(
            tr(
                "{count:,} of {all:,} problems are left out, since they and a reply do not fit into the model's "
                "context of {context:,} tokens. Shorten them, or train a model with a larger --max_seq_len",
                count=left_out,
                all=len(task),
                context=context,
            )
        )
    return numbers


def roll_out(
    task: Task,
    numbers: Sequence[int],
    samples: int,
    sampling: Sampling,
    device_batch_size: int,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    policy: PolicyFlags,
    shuffle: bool = False,
    groups: Groups | None = None,
    reference: Model | None = None,
) -> tuple[Rollouts, list[Sample]]:
    """Sample replies to this rank's share of the problems `numbers` of a task, and weigh their tokens.

    One in `policy.oversample` problems is trained on. `shuffle` reorders the rewards of all these replies at random, as
    a control. Shuffling within each group would not be a fair control: in a group with 15 right replies, most orders
    lower a right reply a little and few raise it a lot, and optimizers that normalise the size of a step let the
    frequent changes win. With `groups`, which samples from `model`, replies are sampled and trained as trees.
    `policy.kl` above 0 needs the `reference` that tokens are pulled back to.
    """
    mine = list(numbers[compute.rank :: compute.world_size])
    prompts = [tokenizer.render_prompt(task[i]) for i in mine]
    limit, overlong = sampling.max_tokens, policy.overlong_tokens
    if groups is None:
        room = min(max(map(len, prompts), default=1) + limit, model.config.sequence_len)
        engine = Engine(model, tokenizer, min(64, max(len(mine) * samples, 1)), room)
    else:
        engine = groups
    # Replies come problem by problem, `samples` of each.
    grade = grader(task, tokenizer)
    completions, rewards = generate_and_judge(
        engine,
        prompts,
        sampling,
        samples,
        lambda at, tokens: grade(mine[at], tokens),
        compute.pulse.beat,
    )
    worth = [
        shaped(reward, len(reply.tokens), limit, overlong)
        for reward, reply in zip(rewards, completions, strict=True)
    ]
    dealt = _dealt(worth, len(numbers), samples, str(sampling.seed), compute) if shuffle else worth
    members = [slice(at * samples, (at + 1) * samples) for at in range(len(mine))]
    judged = [advantages(dealt[group], policy.advantage) for group in members]
    flat = [not any(of_prompt) for of_prompt in judged]
    kept = [
        Sample(
            prompts[at],
            reply,
            token_weights(advantage, reply.forced, reply.finish == "length" and not overlong),
        )
        for at in _trained(flat, len(numbers), policy.oversample, compute)
        for reply, advantage in zip(completions[members[at]], judged[at], strict=True)
    ]
    divergence = 0.0
    if reference is not None:
        kept, divergence = anchored(kept, policy.kl, reference, compute, trees=groups is not None)
    chosen = sum(weight != 0 for sample in kept for weight in sample.weights)
    speaking = sum(any(sample.weights) for sample in kept)
    lengths = [len(reply.tokens) for reply in completions]
    surprise = sum(
        -sum(p for p, f in zip(r.logprobs, r.forced, strict=True) if not f) for r in completions
    )
    free = sum(not f for r in completions for f in r.forced)
    cut = sum(reply.finish == "length" for reply in completions)
    figures = [
        sum(rewards),
        len(rewards),
        sum(lengths),
        surprise,
        free,
        sum(flat),
        len(mine),
        cut,
        chosen,
        speaking,
        divergence,
    ]
    (
        reward,
        count,
        length,
        surprise,
        free,
        flat_all,
        of_all,
        cut_all,
        targets,
        replies,
        divergence,
    ) = parallel.total([float(figure) for figure in figures], compute)
    kept = [
        replace(sample, weights=averaged(sample.weights, policy.average, targets, replies, limit))
        for sample in kept
    ]
    batches, extras = _batches(
        kept, device_batch_size, tokenizer.bos, compute, policy, groups is not None
    )
    rollouts = Rollouts(
        batches,
        int(targets),
        reward / count,
        length / count,
        surprise / max(free, 1),
        flat_all / of_all,
        cut_all / count,
        extras,
        None if reference is None else divergence / max(targets, 1),
    )
    return rollouts, kept


def _dealt(
    worth: Sequence[float], total: int, samples: int, seed: str, compute: Compute
) -> list[float]:
    """This rank's share of the rewards of all ranks' replies to `total` problems, shuffled in the problems' order."""
    rewards = [0.0] * (total * samples)
    mine = [
        at * samples + reply
        for at in range(compute.rank, total, compute.world_size)
        for reply in range(samples)
    ]
    for place, reward in zip(mine, worth, strict=True):
        rewards[place] = reward
    dealt = shuffled(parallel.total(rewards, compute), seed)
    return [dealt[place] for place in mine]


def _trained(flat: Sequence[bool], total: int, oversample: int, compute: Compute) -> list[int]:
    """Which of this rank's problems are trained on: of all ranks' problems in their order, the first ones that are not
    flat, up to one in `oversample` of the `total`."""
    marks = [0.0] * total
    marks[compute.rank :: compute.world_size] = [float(not each) for each in flat]
    worth = [number for number, mark in enumerate(parallel.total(marks, compute)) if mark][
        : total // oversample
    ]
    return [
        number // compute.world_size
        for number in worth
        if number % compute.world_size == compute.rank
    ]


def _batches(
    kept: Sequence[Sample],
    device_batch_size: int,
    pad: int,
    compute: Compute,
    policy: PolicyFlags,
    trees: bool,
) -> tuple[list[tuple[Tensor, ...]], tuple[str, ...]]:
    """The micro-batches of a step, and the names of their tensors behind inputs and targets."""
    extras = ("weights",) if policy.loss == "reinforce" else ("weights", "sampled", "copies")
    if trees:
        apart = APART[policy.loss]
        given = merged(kept) if apart == "replies" else kept
        batches = pack(given, device_batch_size, pad, compute, apart, len(extras) > 1)
        return batches, extras + (("replies",) if apart == "replies" else ()) + TREE
    return [
        rows[: 2 + len(extras)] for rows in _rows(merged(kept), device_batch_size, pad, compute)
    ], extras


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """The samples, with equal samples whose tokens have weights of equal sign merged into one and their weights and
    copies added.

    Short replies are often the same. The gradient is linear in the weights, and of a clipped ratio it is so as long as
    the weights keep their sign.
    """
    found: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]], Sample] = {}
    for sample in samples:
        key = (
            tuple(sample.prompt),
            tuple(sample.completion.tokens),
            tuple(weight > 0 for weight in sample.weights),
        )
        before = found.get(key)
        if before is not None:
            weights = [a + b for a, b in zip(before.weights, sample.weights, strict=True)]
            copies = [a + b for a, b in zip(before.copies, sample.copies, strict=True)]
            sample = Sample(before.prompt, before.completion, weights, copies)
        found[key] = sample
    return list(found.values())


def _rows(samples: Sequence[Sample], rows: int, pad: int, compute: Compute) -> list[Rows]:
    """Samples as padded rows, split into passes of at most `rows` rows; every rank gets the same number of passes."""
    longest = (
        max((len(sample.prompt) + len(sample.completion.tokens) for sample in samples), default=2)
        - 1
    )
    passes = -(-len(samples) // rows)
    counts = [0] * compute.world_size
    counts[compute.rank] = passes
    passes = int(max(parallel.total([float(count) for count in counts], compute)))
    T = -(-longest // ROUND) * ROUND
    batches = []
    for number in range(passes):
        part = samples[number * rows : (number + 1) * rows]
        # Few heights as well as few lengths: libraries cache something for every shape they meet.
        height = min(max(-(-len(part) // ROUND), 1) * ROUND, rows)
        inputs = torch.full((height, T), pad, dtype=torch.long)
        targets = torch.full_like(inputs, -1)
        weights, sampled, copies = (torch.zeros(inputs.shape) for _ in range(3))
        for row, sample in enumerate(part):
            tokens = sample.prompt + sample.completion.tokens
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            first = len(sample.prompt) - 1  # the position that predicts the reply's first token
            last = len(tokens) - 1
            targets[row, first:last] = torch.tensor(sample.completion.tokens)
            weights[row, first:last] = torch.tensor(sample.weights)
            sampled[row, first:last] = torch.tensor(sample.completion.logprobs)
            copies[row, first:last] = torch.tensor(sample.copies, dtype=torch.float32)
        targets[weights == 0] = -1
        pinned = [
            device.pin(tensor, compute) for tensor in (inputs, targets, weights, sampled, copies)
        ]
        batches.append((pinned[0], pinned[1], pinned[2], pinned[3], pinned[4]))
    return batches


@torch.no_grad()
def sampler_gap(samples: Sequence[Sample], model: torch.nn.Module, compute: Compute) -> float:
    """The largest difference between the sampler's and the trainer's log-probability of any token of one sample.

    If the model is sharded, every rank must call it; each rank compares its first sample.
    """
    sample = samples[0] if samples else None
    tokens = sample.prompt + sample.completion.tokens if sample else [0, 0]
    row = torch.tensor([tokens], dtype=torch.long, device=compute.device)
    losses = model(row[:, :-1], row[:, 1:], reduction="none")[0]
    if sample is None:
        return 0.0
    trainer = (-losses[len(sample.prompt) - 1 :]).tolist()
    pairs = zip(trainer, sample.completion.logprobs, sample.completion.forced, strict=True)
    return max((abs(ours - theirs) for ours, theirs, forced in pairs if not forced), default=0.0)
