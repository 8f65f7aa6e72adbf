"""Samples from the current model, graded, as rows to train on."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat import device
from nanochat.data.conversation import Task
from nanochat.device import Compute
from nanochat.engine import Completion, Engine
from nanochat.evals.chat import grader
from nanochat.generate.sampling import Sampling
from nanochat.nn.model import Model
from nanochat.runtime import parallel, signals
from nanochat.tokenizer import Tokenizer
from nanochat.train import policy

ROUND = 32  # rows are padded to a multiple of this, so that few shapes occur


@dataclass(frozen=True)
class Sample:
    """One reply: the tokens of prompt and reply, each reply token's weight in the loss, and how likely it was."""

    prompt: list[int]
    completion: Completion
    weights: list[float]


@dataclass(frozen=True)
class Rollouts:
    """A step's samples of one rank, and figures over all ranks."""

    micro_batches: list[tuple[Tensor, Tensor, Tensor]]  # (inputs, targets, weights), (b, T) each
    num_targets: int  # tokens that are trained, over all ranks
    reward: float  # mean over all samples
    length: float  # mean tokens of a reply
    entropy: float  # mean of -log p of the chosen tokens: an estimate of the policy's entropy in nats
    flat: float  # share of prompts whose samples all did equally well
    truncated: float  # share of samples that were cut off


def task_key(task: Task) -> str:
    """A name for the problems of a task that differs where they do."""
    digest = hashlib.sha256()
    for number in range(len(task)):
        digest.update(repr(task[number]).encode())
    return f"{task.name} {len(task)} {digest.hexdigest()[:16]}"


def roll_out(
    task: Task, numbers: Sequence[int], samples: int, sampling: Sampling, device_batch_size: int, model: Model,
    tokenizer: Tokenizer, compute: Compute, shuffle: bool = False,
) -> tuple[Rollouts, list[Sample]]:  # fmt: skip
    """Sample replies to problems `numbers` of a task, this rank's share of them, and weigh their tokens.

    `shuffle` deals the rewards of all these replies at random, as a control. Dealt within each group they would not
    be a fair one: a group of 15 right replies then mostly lowers the right one a little and seldom raises it much, and
    optimizers that normalise the size of a step let the frequent win.
    """
    mine = list(numbers[compute.rank :: compute.world_size])
    prompts = [tokenizer.render_prompt(task[i]) for i in mine]
    room = min(max(map(len, prompts), default=1) + sampling.max_tokens, model.config.sequence_len)
    engine = Engine(model, tokenizer, min(64, max(len(mine) * samples, 1)), room)
    completions = engine.generate(prompts, sampling, samples, done=lambda index: signals.alive())
    grade = grader(task, tokenizer)
    # Replies come problem by problem, `samples` of each.
    rewards = [grade(mine[at // samples], reply.tokens) for at, reply in enumerate(completions)]
    dealt = policy.shuffled(rewards, str(sampling.seed)) if shuffle else rewards
    kept: list[Sample] = []
    flat = 0
    for at, prompt in enumerate(prompts):
        of_prompt = slice(at * samples, (at + 1) * samples)
        group = policy.group(dealt[of_prompt])
        flat += group.flat
        if not group.flat:
            kept += [
                Sample(prompt, reply, policy.token_weights(advantage, reply.forced, reply.finish == "length"))
                for reply, advantage in zip(completions[of_prompt], group.advantages, strict=True)
            ]
    chosen = sum(weight != 0 for sample in kept for weight in sample.weights)
    lengths = [len(reply.tokens) for reply in completions]
    surprise = sum(-sum(p for p, f in zip(r.logprobs, r.forced, strict=True) if not f) for r in completions)
    free = sum(not f for r in completions for f in r.forced)
    cut = sum(reply.finish == "length" for reply in completions)
    figures = [sum(rewards), len(rewards), sum(lengths), surprise, free, flat, len(mine), cut, chosen]
    reward, count, length, surprise, free, flat_all, groups, cut_all, targets = parallel.total(
        [float(figure) for figure in figures], compute
    )
    batches = _rows(merged(kept), device_batch_size, tokenizer.bos, compute)
    rollouts = Rollouts(batches, int(targets), reward / count, length / count, surprise / max(free, 1),
                        flat_all / groups, cut_all / count)  # fmt: skip
    return rollouts, kept


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with equal ones as one, their weights added: short replies are often the same, and the gradient is
    linear in the weights."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], Sample] = {}
    for sample in samples:
        key = (tuple(sample.prompt), tuple(sample.completion.tokens))
        before = found.get(key)
        if before is not None:
            weights = [a + b for a, b in zip(before.weights, sample.weights, strict=True)]
            sample = Sample(before.prompt, before.completion, weights)
        found[key] = sample
    return list(found.values())


def _rows(samples: Sequence[Sample], rows: int, pad: int, compute: Compute) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Samples as padded rows, cut into passes of at most `rows`; every rank gets equally many passes."""
    longest = max((len(sample.prompt) + len(sample.completion.tokens) for sample in samples), default=2) - 1
    passes = -(-len(samples) // rows)
    counts = [0] * compute.world_size
    counts[compute.rank] = passes
    passes = int(max(parallel.total([float(count) for count in counts], compute)))
    T = -(-longest // ROUND) * ROUND
    batches = []
    for number in range(passes):
        part = samples[number * rows : (number + 1) * rows]
        # Few heights as well as few lengths: libraries keep something for every shape they have met.
        height = min(max(-(-len(part) // ROUND), 1) * ROUND, rows)
        inputs = torch.full((height, T), pad, dtype=torch.long)
        targets = torch.full_like(inputs, -1)
        weights = torch.zeros(inputs.shape)
        for row, sample in enumerate(part):
            tokens = sample.prompt + sample.completion.tokens
            inputs[row, : len(tokens) - 1] = torch.tensor(tokens[:-1])
            first = len(sample.prompt) - 1  # the position that predicts the reply's first token
            last = len(tokens) - 1
            targets[row, first:last] = torch.tensor(sample.completion.tokens)
            weights[row, first:last] = torch.tensor(sample.weights)
        targets[weights == 0] = -1
        batches.append((device.pin(inputs, compute), device.pin(targets, compute), device.pin(weights, compute)))
    return batches


@torch.no_grad()
def sampler_gap(samples: Sequence[Sample], model: torch.nn.Module, compute: Compute) -> float:
    """The largest difference between the sampler's and the trainer's log-probability of a token of one sample.

    Every rank must call it where the model is sharded; each looks at its first sample.
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
