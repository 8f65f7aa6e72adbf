"""Saves sample replies during training: greedy replies to held-out prompts, and graded replies."""

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch.nn as nn

from nanochat.checkpoint_manager.copies import whole_copy
from nanochat.data.conversation import Part, Task, words
from nanochat.dataloader import Source
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.runtime.samples import Sample, keep_samples
from nanochat.tokenizer import Tokenizer

HELD_OUT = "held_out"  # the source of these samples, which the page of runs translates
OPENING = 12  # number of tokens of a document that the model is given to continue
LONGEST = 48  # the largest number of tokens in a reply
ROWS = 64  # the largest number of held-out rows that are searched for prompts


def held_out_prompts(rows: Source, count: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Return at most `count` different prompts, as tokens, from the first held-out rows.

    If a row holds conversations, its prompt ends with the token that starts the first answer.
    Otherwise, it is the beginning of the first document. Prompts that leave no room for a reply are
    skipped.
    """
    room = rows.row_tokens - 1 - LONGEST
    prompts: list[list[int]] = []
    for number in range(min(rows.count, ROWS)):
        if len(prompts) >= count:
            break
        inputs = rows.batch(rows.plan_rows(number, 1))[0]
        prompt = _prompt(inputs[0].tolist(), tokenizer)
        if 1 < len(prompt) <= room and prompt not in prompts:
            prompts.append(prompt)
    return prompts


def _prompt(row: list[int], tokenizer: Tokenizer) -> list[int]:
    """Return the beginning of the first document or conversation in a row, as a prompt."""
    text = row
    if tokenizer.bos in row[1:]:
        text = row[: row.index(tokenizer.bos, 1)]
    answer = tokenizer.special("assistant_start")
    if answer in text:
        return text[: text.index(answer) + 1]
    return text[: 1 + OPENING]


def keep_replies(
    folder: Path,
    step: int,
    prompts: Sequence[Sequence[int]],
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
) -> None:
    """Let a model reply to prompts, and save the replies as samples in the folder of its run.

    Every rank must call this. Since the model may be sharded, rank 0 replies with a temporary whole
    copy. The model and the states of all random generators stay unchanged.
    """
    if not prompts:
        return
    if not compute.main:
        for _ in parallel.whole_parameters(cast(nn.Module, model)):
            pass  # every rank must take part in gathering
        return
    speaker = whole_copy(model, compute)
    room = min(max(map(len, prompts)) + LONGEST, model.config.sequence_len)
    engine = Engine(speaker, tokenizer, len(prompts), room)
    greedy = Sampling(temperature=0.0, max_tokens=LONGEST)
    replies = engine.generate(prompts, greedy, 1, lambda *_: compute.pulse.beat())
    samples = []
    for prompt, reply in zip(prompts, replies, strict=True):
        reply_text = _text(reply.tokens, tokenizer)
        samples.append(Sample(step, HELD_OUT, _text(prompt, tokenizer), reply_text))
    keep_samples(folder, samples)


def _text(tokens: Sequence[int], tokenizer: Tokenizer) -> str:
    return words(reply_parts(tokens, tokenizer))


class Graded:
    """Collects, on rank 0, replies to the first problems of an evaluation, to save as samples.

    Pass the method `hear` to evals.chat.evaluate() as `on_reply`.
    """

    def __init__(self, task: Task, count: int, compute: Compute):
        """Prepare to collect replies to `count` problems of rank 0, or to all if it has fewer."""
        self.task = task
        self.main = compute.main
        self._last = count * compute.world_size  # ranks take turns in the problems
        self._replies: dict[int, tuple[str, float]] = {}  # the text and its grade

    def hear(self, i: int, parts: list[Part], grade: float) -> None:
        """Remember the reply to problem `i` and its grade if the reply is to be saved."""
        if self.main and i < self._last:
            self._replies[i] = (words(parts), grade)

    def keep(self, folder: Path, step: int) -> None:
        """Save the collected replies as samples of a step in the folder of a run."""
        samples = []
        for i, (reply, grade) in sorted(self._replies.items()):
            question = self.task[i].prompt.messages[-1].text
            samples.append(Sample(step, self.task.name, question, reply, grade))
        if samples:
            keep_samples(folder, samples)
