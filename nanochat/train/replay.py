"""Text that a published model writes itself before it is fine-tuned, so that it forgets less.

A model that trains on a few conversations only moves away from everything else that it knows. Rows
of its own words, sampled at temperature 1, hold it: before training, the expected gradient of the
loss on them is zero, and it grows as the model moves. No other data is needed. Half of the words
are replies to general prompts of the package, and half are texts without a prompt.
"""

import itertools
from collections.abc import Iterator, Sequence
from importlib import resources

from nanochat.checkpoint_manager.huggingface.base import Base
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError, log, tr
from nanochat.data.conversation import Conversation, user
from nanochat.dataloader import MixedRows, PackedRows, Rows, blend
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.prepare.conversations import conversation_folder, prepare_rendered
from nanochat.prepare.plan import plan
from nanochat.runtime.progress import Progress, amount
from nanochat.tokenizer import Rendered
from nanochat.train.fit.memory import reachable

VERSION = 1  # part of the key of the words; change it together with what is sampled
MOST_TOKENS = 32_768  # of own words, which a long run reads several times
PER_TOKEN = 2  # tokens of own words for each token of the data, until there are MOST_TOKENS
LONGEST_TEXT = 256  # tokens of a text or a reply
SLOTS = 16  # texts that are sampled together
MEMORY_SHARE = 0.8  # of the device's memory, which the whole model may take while it writes


def check_replay(every: int, base: Base, compute: Compute) -> None:
    """Raise UserError (exit code 2) if one row in `every` cannot be the model's own; 0: none is.

    The whole model must fit one device to write its words.
    """
    if every == 1:
        raise UserError(
            tr(
                "--replay_every must be 0 or at least 2, got 1: no row would be left for the data. "
                "Leave it out, or give --replay_every=4"
            ),
            exit_code=2,
        )
    size = base.model.parameter_counts()["total"] * compute.dtype.itemsize
    available = reachable(compute)
    if every and size > MEMORY_SHARE * available:
        raise UserError(
            tr(
                "--replay_every={every} needs the whole model on one device to write its own words: "
                "it takes {size}, and {available} are there. Leave the flag out",
                every=every,
                size=amount(size, "B"),
                available=amount(available, "B"),
            ),
            exit_code=2,
        )


def with_own_words(rows: Rows, every: int, base: Base, seed: int, compute: Compute) -> MixedRows:
    """Return `rows` with one row in `every` from the model's own words, which are made if needed.

    Every rank calls this before the weights of the trained model are loaded.
    """
    data_tokens = rows.count * (rows.row_tokens - 1)
    tokens = min(PER_TOKEN * data_tokens, MOST_TOKENS)
    key = f"own words {VERSION} {base.identity} {tokens} {seed} {rows.row_tokens}"
    longest = min(LONGEST_TEXT, rows.row_tokens)
    folder = conversation_folder("own-words", base.tokenizer, key)

    def sampled() -> list[Rendered]:
        return list(_sampled(base, tokens, longest, seed, compute))

    token_set = prepare_rendered(folder, sampled, base.tokenizer, key)
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
    return blend(rows, own_rows, every)


def _sampled(
    base: Base, tokens: int, longest: int, seed: int, compute: Compute
) -> Iterator[Rendered]:
    """Yield texts and replies of the model until they have `tokens` tokens together.

    No text has more than `longest` tokens with its prompt. Only sampled tokens are marked as
    trained.
    """
    loaded = load_published(base.folder, None, compute)
    tokenizer = loaded.tokenizer
    engine = Engine(loaded.model, tokenizer, slots=SLOTS, length=longest)
    prompts = [tokenizer.render_prompt(Conversation((user(text),))) for text in _questions()]
    short_prompts = [prompt for prompt in prompts if len(prompt) <= longest // 2]
    total = 0
    with Progress(tr("own words"), tokens, tr("tokens")) as progress:
        for round_number in itertools.count():
            sampling = Sampling(temperature=1.0, max_tokens=longest, seed=seed + round_number)
            chosen = _turn(short_prompts, round_number)
            replies = engine.generate(chosen, sampling)
            texts = engine.generate([[tokenizer.bos]], sampling, samples=SLOTS)
            starts = [*chosen, *([[tokenizer.bos]] * SLOTS)]
            for start, completion in zip(starts, [*replies, *texts], strict=True):
                trained = [int(not forced) for forced in completion.forced]
                yield Rendered([*start, *completion.tokens], [0] * len(start) + trained)
                total += len(start) + len(trained)
                progress.advance(len(start) + len(trained))
                if total >= tokens:
                    return


def _turn(prompts: Sequence[list[int]], round_number: int) -> list[list[int]]:
    """Return the different prompts of a round, at most one for each slot, in turn."""
    count = min(SLOTS, len(prompts))
    return [prompts[(round_number * count + i) % len(prompts)] for i in range(count)]


def _questions() -> list[str]:
    text = resources.files("nanochat").joinpath("data/general/prompts.txt").read_text("utf-8")
    return text.splitlines()
