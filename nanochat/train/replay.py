"""Text that a published model writes itself before it is fine-tuned, so that it forgets less.

A model that trains only on a few conversations forgets other things that it knows. Rows of its own
words, sampled at temperature 1, pull it back: their loss estimates how far the model has diverged
from the model before training. No other data is needed. Half of the words are replies to
general prompts of the package, and half are texts without a prompt. No prompt greets the model or
asks it about itself, since the data may teach it another answer.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from nanochat.checkpoint_manager.copies import with_own_operations
from nanochat.checkpoint_manager.huggingface.base import Base
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError, log, tr
from nanochat.context import Packed
from nanochat.data.conversation import Conversation, user
from nanochat.dataloader import Rows
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.prepare.conversations import conversation_folder, prepare_rendered
from nanochat.prepare.interleave import MixedRows, blend
from nanochat.prepare.plan import plan
from nanochat.runtime import parallel
from nanochat.runtime.progress import Progress, amount
from nanochat.tokenizer import Rendered, Tokenizer
from nanochat.train.chat_rows import PackedRows
from nanochat.train.fit.memory import reachable
from nanochat.train.flags import Auto
from nanochat.train.references import row_scores, saved_or_scored
from nanochat.train.tuning_rules import tuning_repeats

VERSION = 4  # part of the key of the own words; raise it when the sampling changes
# A model that reads its own words again knows rare tokens of them by heart, and then they no longer
# tell how far it has diverged. So it writes as many as the run reads, up to this number of tokens.
MOST_TOKENS = 204_800
GRAIN = 20_480  # the tokens to write are a multiple of this, so that similar runs share them
LONGEST_TEXT = 256  # tokens of a text or a reply
SLOTS = 32  # texts that are sampled together
EVERY = 4  # by default, one row in 4 is the model's own
# With more tokens of data than this, the model writes no words by default: such data is varied
# enough, and the few own words would be repeated many times.
MOST_DATA = 1_000_000
NOT_OWN = 1.0  # stands for the reference of a token of the data; no log-probability is above 0
# In nats: the pull on a token stops growing once the model finds it this much more likely. With a
# larger cap, a few tokens would outweigh everything else in a step (dev/LOG.md).
LARGEST = 1.0
# What anchored_loss() sums apart: the two losses, and the number of tokens of own words.
FIGURES = ("data_loss", "own_words_loss", "own_words_share")
MEMORY_SHARE = 0.8  # share of the device's memory that the whole model may take as it writes


def check_replay(every: int | Auto, loss: str, base: Base, compute: Compute) -> None:
    """Raise UserError (exit code 2) if one row in `every` cannot be the model's own words.

    The whole model must fit one device to write its words, and with DPO (`loss` is "dpo") rows hold
    only pairs of answers. 0 and "auto" are always accepted: "auto" leaves own words out where they
    are impossible.
    """
    if every == "auto" or every == 0:
        return
    if every == 1:
        raise UserError(
            tr(
                "--replay_every must be 0 or at least 2, got 1: no row would be left for the data. "
                "Leave it out, or give --replay_every=4"
            ),
            exit_code=2,
        )
    if loss == "dpo":
        raise UserError(
            tr(
                "--replay_every={every} is for --loss=answers: dpo is held to the model before "
                "training by --dpo_beta. Leave the flag out",
                every=every,
            ),
            exit_code=2,
        )
    if not _fits_whole(base, compute):
        raise UserError(
            tr(
                "--replay_every={every} needs the whole model on one device to write its own words: "
                "it takes {size}, and {available} are there. Leave the flag out",
                every=every,
                size=amount(_size(base, compute), "B"),
                available=amount(reachable(compute), "B"),
            ),
            exit_code=2,
        )


def resolve_every(every: int | Auto, loss: str, rows: Rows, has_room: bool) -> int:
    """Return N if one row in N is to be the model's own, or 0 if no row is.

    N is `every`, unless that is "auto". `has_room` is what has_room() returned when the run began.
    """
    if every != "auto":
        return every
    data_tokens = rows.count * (rows.row_tokens - 1)
    if loss == "dpo" or data_tokens > MOST_DATA or not has_room:
        return 0
    return EVERY


def has_room(base: Base, compute: Compute) -> bool:
    """Return whether the device of every rank can hold the whole model, so that it can write.

    Every rank must call this; all get the same answer. It depends on the free memory, so a run
    saves it, and decides by the saved answer when it resumes.
    """
    return bool(parallel.least(int(_fits_whole(base, compute)), compute))


def _size(base: Base, compute: Compute) -> int:
    return base.model.parameter_counts()["total"] * compute.dtype.itemsize


def _fits_whole(base: Base, compute: Compute) -> bool:
    """Return whether a device of this rank can hold the whole model, in order to write."""
    return _size(base, compute) <= MEMORY_SHARE * reachable(compute)


class AnchoredRows(MixedRows):
    """Rows of the data, and rows of the model's own words, whose loss pulls the model back.

    A batch has one more tensor, `references`, float32 (B, T): the log-probability that the model
    gave each target of its own words before training, and NOT_OWN for the targets of the data.
    """

    extras: tuple[str, ...] = ("documents", "references")

    def __init__(self, data_rows: Rows, own_rows: PackedRows, every: int):
        """Take one row in `every` from `own_rows`; an epoch has all rows of `data_rows`.

        The references of `own_rows` are NOT_OWN until add_references() computes them.
        """
        mixture = blend(data_rows, own_rows, every)
        key = f"{mixture.key} anchored"  # checkpoints contain this key
        super().__init__(mixture.sources, mixture.shares, mixture.count, key)
        self.own_rows = own_rows
        shape = (own_rows.size, own_rows.row_tokens - 1)
        self.references: np.ndarray = np.full(shape, NOT_OWN, np.float32)

    def batch(self, plan_rows: np.ndarray) -> tuple[Tensor, ...]:
        """Return (inputs, targets, documents, references) of rows of the plans, (B, T) each."""
        references = np.full((len(plan_rows), self.row_tokens - 1), NOT_OWN, np.float32)
        first_own = self.sources[0].size
        is_own = plan_rows >= first_own
        references[is_own] = self.references[plan_rows[is_own] - first_own]
        return *super().batch(plan_rows), torch.from_numpy(references)


def anchored_loss(
    losses: Tensor,  # (B, T) fp32, in nats, 0 for ignored tokens
    references: Tensor,  # (B, T) as in AnchoredRows
) -> tuple[Tensor, Tensor]:  # (), (3,)
    """Return the summed loss of tokens of the data and of the model's own words, and FIGURES of it.

    A token of the data counts as it is. A token of the model's own words counts as r - 1 - log r,
    where r is its probability now over the one before training. The mean of that is the divergence
    KL(before || now), and its gradient is exactly 0 for every single token of an unchanged model
    (Schulman 2020, joschu.net/blog/kl-approx.html); the gradient of the plain loss is 0 on average
    only, and its noise slows the learning of the data.
    """
    log_ratio = -losses - references
    capped = log_ratio.clamp_max(LARGEST)
    ratio = capped.exp()
    # Beyond the cap, the loss continues as a straight line, so that the pull stays constant.
    divergence = ratio - 1 - log_ratio + ratio.detach() * (log_ratio - capped)
    is_own = references != NOT_OWN
    data_loss = losses.masked_fill(is_own, 0).sum()
    own_loss = divergence.masked_fill(~is_own, 0).sum()
    return data_loss + own_loss, torch.stack((data_loss, own_loss, is_own.sum()))


def mean_losses(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the mean loss of the data's tokens and that of own words, each if a step has some.

    `figures` holds the sums of FIGURES over the number of all targets.
    """
    data_loss, own_loss, own_share = (figures[name] for name in FIGURES)
    means = {}
    if own_share < 1:
        means["data_loss"] = data_loss / (1 - own_share)
    if own_share > 0:
        means["own_words_loss"] = own_loss / own_share
    return means


def add_references(
    rows: AnchoredRows,
    model: nn.Module,
    identity: str,
    batch_rows: int,
    compute: Compute,
) -> None:
    """Set `rows.references` to the log-probabilities of the model's own words before training.

    The arguments, the file that saves the values and the errors are those of
    preferences.add_references(). Every rank must call this.
    """

    def score(inputs: Tensor, targets: Tensor, documents: Tensor) -> Tensor:  # (B, T)
        losses = model(inputs, targets, "none", context=Packed(documents))
        return torch.where(targets >= 0, -losses.float(), NOT_OWN)

    def score_all() -> np.ndarray:
        references = np.zeros_like(rows.references)
        for row, log_probabilities in row_scores(own_rows, model, score, batch_rows, compute):
            references[row] = log_probabilities
        return references

    own_rows = rows.own_rows
    facts = f"{own_rows.key} {identity} {compute.dtype}"
    shape = rows.references.shape
    rows.references = saved_or_scored(own_rows.folder, facts, shape, score_all, compute)


def with_own_words(
    rows: Rows, every: int, base: Base, run_rows: int, seed: int, compute: Compute
) -> AnchoredRows:
    """Return `rows` mixed with the model's own words, which fill one row in `every`.

    The model writes them now, unless they are on the disk already: as many as a run reads that
    reads `run_rows` rows of the mixture, up to MOST_TOKENS. A narrow model, which reads its data
    more often than others, reads its words as often too. Every rank must call this before the
    weights of the trained model are loaded.
    """
    repeats = tuning_repeats(base.model.config.n_embd)
    rows_to_write = math.ceil(run_rows / every / repeats)
    grains = -(-rows_to_write * rows.row_tokens // GRAIN)
    tokens = min(grains * GRAIN, MOST_TOKENS)
    key = f"own words {VERSION} {base.outputs} {tokens} {seed} {rows.row_tokens}"
    longest = min(LONGEST_TEXT, rows.row_tokens)
    folder = conversation_folder("own-words", base.tokenizer, key)

    def written() -> list[Rendered]:
        return _written(base, tokens, longest, seed, compute)

    token_set = prepare_rendered(folder, written, base.tokenizer, key)
    own_plan = plan(token_set, rows.row_tokens, cut=False, too_long="cut")
    own_rows = PackedRows(token_set, own_plan, base.tokenizer.bos, seed, masked=True)
    log(
        tr(
            "replay_every: {every} (one row in {every} holds the model's own words, "
            "{tokens:,} tokens, so that it forgets less)",
            every=every,
            tokens=token_set.tokens,
        )
    )
    return AnchoredRows(rows, own_rows, every)


def _written(base: Base, tokens: int, longest: int, seed: int, compute: Compute) -> list[Rendered]:
    """Return texts and replies that the model writes, with about `tokens` tokens together.

    None has more than `longest` tokens with its prompt. Only sampled tokens are marked as trained.
    """
    own_compute = with_own_operations(compute)
    loaded = load_published(base.folder, None, own_compute)
    own_compute.operations.serve(cast(nn.Module, loaded.model))
    longest = min(longest, loaded.model.config.sequence_len)  # a row has one token more
    engine = Engine(loaded.model, loaded.tokenizer, slots=SLOTS, length=longest)
    starts = _starts(loaded.tokenizer, longest)
    texts: list[Rendered] = []
    with Progress(tr("own words"), tokens, tr("tokens")) as progress:
        # The second round makes up for the texts of the first that end before they are `longest`.
        for _ in range(2):
            written = sum(len(text.ids) for text in texts)
            expected_length = max(written / len(texts), longest / 8) if texts else longest
            count = max(math.ceil((tokens - written) / expected_length), 0)
            round_starts = list(itertools.islice(starts, count))
            first_seed = seed + len(texts)
            requests = [
                (start, Sampling(temperature=1.0, max_tokens=longest, seed=first_seed + i))
                for i, start in enumerate(round_starts)
            ]
            completions = engine.complete(requests, on_token=lambda: progress.advance(1))
            for start, completion in zip(round_starts, completions, strict=True):
                trained = [int(not forced) for forced in completion.forced]
                texts.append(Rendered([*start, *completion.tokens], [0] * len(start) + trained))
    return texts


def _starts(tokenizer: Tokenizer, longest: int) -> Iterator[list[int]]:
    """Yield general prompts in turn, and the beginning of a text without a prompt after each."""
    questions = resources.files("nanochat").joinpath("data/general/prompts.txt").read_text("utf-8")
    chats = [Conversation((user(question),)) for question in questions.splitlines()]
    prompts = [tokenizer.render_prompt(chat) for chat in chats]
    short_prompts = [prompt for prompt in prompts if len(prompt) <= longest // 2]
    for prompt in itertools.cycle(short_prompts or [[tokenizer.bos]]):
        yield prompt
        yield [tokenizer.bos]
