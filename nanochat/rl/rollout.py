"""Samples replies from the current model, grades them, and turns them into training batches."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from nanochat import device
from nanochat.common import UserError, tr, warn
from nanochat.data.conversation import Task
from nanochat.device import Compute
from nanochat.engine import Completion, Engine
from nanochat.evals.chat import generate_and_grade
from nanochat.generate.sampling import Sampling
from nanochat.model import Model
from nanochat.rl.anchor import anchored
from nanochat.rl.groups import Groups
from nanochat.rl.policy import (
    PolicyFlags,
    advantages,
    averaged,
    shaped,
    shuffled,
    token_weights,
)
from nanochat.rl.rewards import Rewarded
from nanochat.rl.sampler import Reference
from nanochat.rl.trees import SUMMED, TREE, Sample, most_passes, pack
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

ROUND = 32  # rows are padded to a multiple of this many tokens, to keep the number of shapes small
ENGINE_ROWS = 64  # maximum number of replies that the engine decodes at once
IGNORED = -1  # target that is not trained
ROUND_SEED = 1 << 60  # added to the seed where a step has a problem again; far above those of steps

Rows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Figures:
    """Statistics of the replies of a step, over all ranks."""

    reward: float  # mean over all samples
    length: float  # mean number of tokens in a reply
    entropy: float  # mean of -log p of the chosen tokens, which estimates the policy's, in nats
    flat: float  # share of prompts whose samples all did equally well
    truncated: float  # share of samples that were cut off
    kl: float | None = None  # estimated divergence from the reference, in nats per trained token


@dataclass(frozen=True)
class Rollouts:
    """One rank's training batches of a step, with statistics over all ranks."""

    # inputs, targets and extras, (b, T) each; for trees as trees.pack() says
    micro_batches: list[tuple[Tensor, ...]]
    num_targets: int  # tokens that are trained, over all ranks
    measured: Figures
    # the names of the extras; "sampled" and "copies" are for losses with ratios
    extras: tuple[str, ...] = ("weights",)

    def __str__(self) -> str:
        measured = self.measured
        parts = [
            f"reward: {measured.reward:.3f}",
            f"length: {measured.length:.1f}",
            f"entropy: {measured.entropy:.3f}",
            f"equal groups: {measured.flat:.0%}",
            f"cut off: {measured.truncated:.0%}",
        ]
        if measured.kl is not None:
            parts.append(f"kl: {measured.kl:.4f}")
        return " | ".join(parts)

    def figures(self) -> dict[str, float]:
        """Return a dict of the statistics that were measured, by name, for metrics.jsonl."""
        figures = asdict(self.measured)
        return {name: value for name, value in figures.items() if value is not None}


def task_key(task: Task) -> str:
    """Return a key for the content of a task, which changes if any of its problems changes.

    Functions may reward by the whole record of a problem, which then is part of the content.
    """
    digest = hashlib.sha256()
    for number in range(len(task)):
        digest.update(repr(task[number]).encode())
        if isinstance(task, Rewarded):
            digest.update(repr(task.record(number)).encode())
    return f"{task.name} {len(task)} {digest.hexdigest()[:16]}"


def fitting(task: Task, tokenizer: Tokenizer, context: int) -> list[int]:
    """Return the indices of the problems whose prompts leave room for a reply token in the context.

    Warns if some problems do not fit. Raises UserError if none fits.
    """
    numbers = [i for i in range(len(task)) if len(tokenizer.render_prompt(task[i])) < context]
    if not numbers:
        raise UserError(
            tr(
                "no problem of {task} fits into the model's context of {context:,} tokens. "
                "Shorten the problems, or "
                "train a model with a larger --max_seq_len",
                task=task.name,
                context=context,
            )
        )
    if left_out := len(task) - len(numbers):
        warn(
            tr(
                "{count:,} of {all:,} problems are left out, since they and a reply do not fit "
                "into the model's "
                "context of {context:,} tokens. Shorten them, or train a model with a larger "
                "--max_seq_len",
                count=left_out,
                all=len(task),
                context=context,
            )
        )
    return numbers


@dataclass(frozen=True)
class Practice:
    """How the replies of each step are sampled, and how they become batches.

    `shuffle` reorders the rewards of all ranks at random, as a control. Shuffling within each group
    would not be a fair control: if most replies are right, most orders lower the total advantage of
    the right replies a little and few raise it a lot, and optimizers that normalise the size of a
    step let the frequent changes win.
    """

    samples: int  # replies to each problem
    sampling: Sampling
    batch_rows: int  # replies per training pass on one device, at most
    policy: PolicyFlags
    shuffle: bool = False

    def seeded(self, seed: int) -> "Practice":
        """Return the same practice with the seed of a step."""
        return replace(self, sampling=replace(self.sampling, seed=seed))


def roll_out(
    task: Task,
    numbers: Sequence[int],
    practice: Practice,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
    groups: Groups | None = None,
    reference: Reference | None = None,
) -> tuple[Rollouts, list[Sample]]:
    """Sample and grade replies to problems, and return this rank's batches and trained samples.

    The ranks divide `numbers`, the indices of the problems. Of these problems, at most one in
    `policy.oversample` is trained on.

    With `groups`, which must sample from `model`, replies are sampled and trained on as trees.
    `reference` returns the model that `policy.kl` pulls tokens back to, and is called once, after
    sampling; without it, nothing is pulled.
    """
    policy = practice.policy
    sampling = practice.sampling
    samples = practice.samples
    all_prompts = [tokenizer.render_prompt(task[number]) for number in numbers]
    own_share = slice(compute.rank, None, compute.world_size)
    prompts = all_prompts[own_share]
    engine = groups or _engine_for(prompts, practice, model, tokenizer)
    rounds = _rounds(all_prompts)[own_share]
    replies, rewards = _graded_replies(
        task, numbers[own_share], prompts, rounds, engine, practice, tokenizer, compute
    )
    limit = sampling.max_tokens
    overlong = policy.overlong_tokens
    shaped_rewards = []
    for index, (reward, reply) in enumerate(zip(rewards, replies, strict=True)):
        room = model.config.sequence_len - len(prompts[index // samples])
        # After a long prompt, the context cuts a reply before it has `limit` tokens.
        shaped_reward = shaped(reward, len(reply.tokens), min(limit, room), overlong)
        shaped_rewards.append(shaped_reward)
    if practice.shuffle:
        seed = str(sampling.seed)
        shaped_rewards = _shuffled(shaped_rewards, len(numbers), samples, seed, compute)
    reward_groups = [
        shaped_rewards[first : first + samples] for first in range(0, len(shaped_rewards), samples)
    ]
    advantage_groups = [advantages(group, policy.advantage) for group in reward_groups]
    flat = [not any(group_advantages) for group_advantages in advantage_groups]
    trained_samples = []
    for problem in _trained(flat, len(numbers), policy.oversample, compute):
        first = problem * samples
        problem_replies = replies[first : first + samples]
        for reply, advantage in zip(problem_replies, advantage_groups[problem], strict=True):
            skipped = reply.finish == "length" and not overlong
            weights = token_weights(advantage, reply.forced, skipped)
            trained_samples.append(Sample(prompts[problem], reply, weights))
    divergence = 0.0
    if reference is not None:
        trained_samples, divergence = anchored(
            trained_samples, policy.kl, reference(), compute, trees=groups is not None
        )
    totals = _totals(replies, rewards, flat, trained_samples, divergence, compute)
    trained_samples = [
        replace(
            sample,
            weights=averaged(
                sample.weights, policy.average, totals.targets, totals.speaking, limit
            ),
        )
        for sample in trained_samples
    ]
    batches, extras = _batches(
        trained_samples, practice.batch_rows, tokenizer.bos, compute, policy, groups is not None
    )
    measured = totals.figures(with_kl=reference is not None)
    return Rollouts(batches, int(totals.targets), measured, extras), trained_samples


def _graded_replies(
    task: Task,
    numbers: Sequence[int],
    prompts: Sequence[list[int]],
    rounds: Sequence[int],
    engine: Engine | Groups,
    practice: Practice,
    tokenizer: Tokenizer,
    compute: Compute,
) -> tuple[list[Completion], list[float]]:
    """Return the replies to this rank's problems, the samples of each in turn, and their rewards.

    Problems of different `rounds`, which _rounds() returns, are sampled with different seeds.
    """
    samples = practice.samples
    sampling = practice.sampling
    replies = [Completion()] * (len(prompts) * samples)
    rewards = [0.0] * len(replies)
    for round_number in sorted(set(rounds)):
        places = [place for place, number in enumerate(rounds) if number == round_number]
        round_replies, _, round_rewards = generate_and_grade(
            task,
            [numbers[place] for place in places],
            engine,
            [prompts[place] for place in places],
            replace(sampling, seed=sampling.seed + round_number * ROUND_SEED),
            samples,
            tokenizer,
            compute.pulse.beat,
        )
        indices = [place * samples + i for place in places for i in range(samples)]
        for index, reply, reward in zip(indices, round_replies, round_rewards, strict=True):
            replies[index] = reply
            rewards[index] = reward
    return replies, rewards


def _rounds(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each prompt, how many equal ones come before it.

    The seeds of samples follow from the prompt, so equal prompts need different seeds for other
    replies.
    """
    occurrences: Counter[tuple[int, ...]] = Counter()
    rounds = []
    for prompt in prompts:
        rounds.append(occurrences[tuple(prompt)])
        occurrences[tuple(prompt)] += 1
    return rounds


def _engine_for(
    prompts: Sequence[Sequence[int]],
    practice: Practice,
    model: Model,
    tokenizer: Tokenizer,
) -> Engine:
    """Return an engine in which every one of these prompts has room for a reply."""
    longest = max(map(len, prompts), default=1)
    room = min(longest + practice.sampling.max_tokens, model.config.sequence_len)
    rows = min(ENGINE_ROWS, max(len(prompts) * practice.samples, 1))
    return Engine(model, tokenizer, rows, room)


@dataclass(frozen=True)
class _Totals:
    """The sums over all ranks from which the statistics of a step are computed."""

    reward: float
    replies: float
    tokens: float
    surprise: float  # -log p of the tokens that the model chose
    chosen: float  # tokens that the model chose
    flat: float  # problems whose replies did equally well
    problems: float
    cut: float  # replies that were cut off
    targets: float  # tokens that are trained
    speaking: float  # replies with at least one token that is trained
    divergence: float

    def figures(self, with_kl: bool) -> Figures:
        """Return the statistics, with the divergence only if `with_kl`."""
        return Figures(
            self.reward / self.replies,
            self.tokens / self.replies,
            self.surprise / max(self.chosen, 1),
            self.flat / self.problems,
            self.cut / self.replies,
            self.divergence / max(self.targets, 1) if with_kl else None,
        )


def _totals(
    replies: Sequence[Completion],
    rewards: Sequence[float],
    flat: Sequence[bool],
    samples: Sequence[Sample],
    divergence: float,
    compute: Compute,
) -> _Totals:
    """Return the sums over the replies and the trained samples of all ranks."""
    surprise = 0.0
    chosen = 0
    for reply in replies:
        free = [
            logprob
            for logprob, forced in zip(reply.logprobs, reply.forced, strict=True)
            if not forced
        ]
        surprise += -sum(free)
        chosen += len(free)
    own_sums = [
        sum(rewards),
        len(rewards),
        sum(len(reply.tokens) for reply in replies),
        surprise,
        chosen,
        sum(flat),
        len(flat),
        sum(reply.finish == "length" for reply in replies),
        sum(weight != 0 for sample in samples for weight in sample.weights),
        sum(any(sample.weights) for sample in samples),
        divergence,
    ]
    return _Totals(*parallel.total([float(own_sum) for own_sum in own_sums], compute))


def _shuffled(
    own_rewards: Sequence[float], problems: int, samples: int, seed: str, compute: Compute
) -> list[float]:
    """Shuffle the rewards of all ranks together, and return this rank's share of them."""
    rewards = [0.0] * (problems * samples)
    own_places = [
        problem * samples + reply
        for problem in range(compute.rank, problems, compute.world_size)
        for reply in range(samples)
    ]
    for place, reward in zip(own_places, own_rewards, strict=True):
        rewards[place] = reward
    reordered = shuffled(parallel.total(rewards, compute), seed)
    return [reordered[place] for place in own_places]


def _trained(flat: Sequence[bool], total: int, oversample: int, compute: Compute) -> list[int]:
    """Return the indices, among this rank's problems, of those that are trained on.

    Over all ranks, these are the first problems whose replies differ in reward, and at most `total`
    // `oversample` of them.
    """
    marks = [0.0] * total
    marks[compute.rank :: compute.world_size] = [float(not is_flat) for is_flat in flat]
    teaching = [number for number, mark in enumerate(parallel.total(marks, compute)) if mark]
    return [
        number // compute.world_size
        for number in teaching[: total // oversample]
        if number % compute.world_size == compute.rank
    ]


def _batches(
    samples: Sequence[Sample],
    batch_rows: int,
    pad: int,
    compute: Compute,
    policy: PolicyFlags,
    trees: bool,
) -> tuple[list[tuple[Tensor, ...]], tuple[str, ...]]:
    """Return the micro-batches of a step, and the names of their tensors after the targets."""
    ratios = policy.loss != "reinforce"
    extras = ("weights", "sampled", "copies") if ratios else ("weights",)
    if not trees:
        batches = _rows(merged(samples), batch_rows, pad, compute)
        return [tensors[: 2 + len(extras)] for tensors in batches], extras
    summed = SUMMED[policy.loss]
    if summed == "same reply":
        samples = merged(samples)
        extras += ("replies",)
    extras += TREE
    return pack(samples, batch_rows, pad, compute, summed, extras), extras


def merged(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with equal ones merged, adding up their weights and copies.

    Short replies are often the same. Samples are merged only if their weights are positive for the
    same tokens. This keeps the gradient, which is linear in the weights; the gradient of a clipped
    ratio is linear only as long as the weights keep their signs.
    """
    distinct: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...]], Sample] = {}
    for sample in samples:
        signs = tuple(weight > 0 for weight in sample.weights)
        key = (tuple(sample.prompt), tuple(sample.completion.tokens), signs)
        before = distinct.get(key)
        if before is not None:
            weights = [a + b for a, b in zip(before.weights, sample.weights, strict=True)]
            copies = [a + b for a, b in zip(before.copies, sample.copies, strict=True)]
            sample = Sample(before.prompt, before.completion, weights, copies)
        distinct[key] = sample
    return list(distinct.values())


def _rows(samples: Sequence[Sample], rows: int, pad: int, compute: Compute) -> list[Rows]:
    """Return the tensors of each pass over the samples, with one padded row per sample.

    A pass has at most `rows` rows. Every rank gets the same number of passes.
    """
    longest = max((sample.length for sample in samples), default=2) - 1
    row_tokens = -(-longest // ROUND) * ROUND
    batches = []
    for number in range(most_passes(len(samples), rows, compute)):
        pass_samples = samples[number * rows : (number + 1) * rows]
        # Keep the number of heights small, like that of lengths: libraries cache something for
        # every shape.
        height = min(max(-(-len(pass_samples) // ROUND), 1) * ROUND, rows)
        tensors = _pass(pass_samples, height, row_tokens, pad)
        inputs, targets, weights, sampled, copies = (
            device.pin(tensor, compute) for tensor in tensors
        )
        batches.append((inputs, targets, weights, sampled, copies))
    return batches


def _pass(samples: Sequence[Sample], height: int, row_tokens: int, pad: int) -> Rows:
    """Return inputs, targets, weights, the sampler's log-probabilities and copies, (b, T) each."""
    inputs = torch.full((height, row_tokens), pad, dtype=torch.long)
    targets = torch.full_like(inputs, IGNORED)
    weights, sampled, copies = (torch.zeros(inputs.shape) for _ in range(3))
    for row, sample in enumerate(samples):
        reply = sample.completion
        tokens = sample.prompt + reply.tokens
        last = len(tokens) - 1
        first = len(sample.prompt) - 1  # the position that predicts the reply's first token
        inputs[row, :last] = torch.tensor(tokens[:-1])
        targets[row, first:last] = torch.tensor(reply.tokens)
        weights[row, first:last] = torch.tensor(sample.weights)
        sampled[row, first:last] = torch.tensor(reply.logprobs)
        copies[row, first:last] = torch.tensor(sample.copies, dtype=torch.float32)
    targets[weights == 0] = IGNORED
    return inputs, targets, weights, sampled, copies


@torch.no_grad()
def sampler_gap(samples: Sequence[Sample], model: torch.nn.Module, compute: Compute) -> float:
    """Return the largest gap between a token's log-probability in the sampler and in `model`.

    Only this rank's first sample is compared; without one, return 0. If the model is sharded, every
    rank must call this.
    """
    sample = samples[0] if samples else None
    tokens = sample.prompt + sample.completion.tokens if sample else [0, 0]
    row = torch.tensor([tokens], dtype=torch.long, device=compute.device)
    losses = model(row[:, :-1], row[:, 1:], reduction="none")[0]
    if sample is None:
        return 0.0
    trainer = (-losses[len(sample.prompt) - 1 :]).tolist()
    reply = sample.completion
    columns = zip(trainer, reply.logprobs, reply.forced, strict=True)
    gaps = [abs(ours - theirs) for ours, theirs, forced in columns if not forced]
    return max(gaps, default=0.0)
