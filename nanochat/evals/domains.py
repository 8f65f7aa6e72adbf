"""Bits per byte by language and domain: which texts of a split a model predicts well."""

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

from nanochat.common import UserError
from nanochat.data.corpora import Corpus, shards
from nanochat.data.mixing import Data
from nanochat.data.shards import texts
from nanochat.device import Compute
from nanochat.evals.likelihood import PromptRow, score_rows
from nanochat.evals.loss import Loss
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

SUMS = 0.2  # the share of digits and signs of arithmetic above which a text counts as sums
_SUM = re.compile(r"[0-9+*/=×÷<>-]")
# First word of a character's Unicode name -> the language that its script stands for.
SCRIPTS = {
    "CJK": "zh",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "HANGUL": "ko",
    "LATIN": "latin",
    "CYRILLIC": "cyrillic",
    "ARABIC": "arabic",
    "GREEK": "greek",
    "HEBREW": "hebrew",
    "THAI": "thai",
    "DEVANAGARI": "devanagari",
}
READ_CHARACTERS = 2_000  # of a document, to find its domain


def domain(text: str) -> str:
    """The domain of a document: sums, or the script of most of its letters; a Chinese character counts three times.

    A Chinese character says about as much as three Latin letters. Kana make a text Japanese from a tenth on, since
    Japanese is mostly written with Chinese characters.
    """
    some = text[:READ_CHARACTERS]
    shown = [character for character in some if not character.isspace()]
    if shown and len(_SUM.findall(some)) / len(shown) > SUMS:
        return "sums"
    counts: Counter[str] = Counter()
    for character, count in Counter(shown).items():
        if character.isalpha():
            script = SCRIPTS.get(unicodedata.name(character, "").split(" ")[0], "other")
            counts[script] += count * (3 if script == "zh" else 1)
    if not counts:
        return "other"
    if counts["ja"] * 10 > counts.total() // 3:
        return "ja"
    return counts.most_common(1)[0][0]


def _named(prefix: str, corpus: Corpus) -> Iterator[tuple[str, str]]:
    yield from ((prefix + domain(text), text) for text in texts(shards(corpus, "val")))


def _documents(data: Data) -> Iterable[tuple[str, str]]:
    """The validation documents of every corpus in turn, each with its domain; a mixture's name the corpus too."""
    prefixes = [f"{corpus.name}: " if len(data.corpora) > 1 else "" for corpus in data.corpora]
    parts = [_named(prefix, corpus) for prefix, corpus in zip(prefixes, data.corpora, strict=True)]
    for group in itertools.zip_longest(*parts):
        yield from (one for one in group if one is not None)


def evaluate_domains(
    model: Model,
    tokenizer: Tokenizer,
    data: Data,
    tokens: int,
    tokens_per_batch: int,
    compute: Compute,
) -> dict[str, Loss]:
    """The loss in each domain of the first `tokens` tokens of the validation split, by name; ranks share the rows.

    Documents longer than the context are cut, and every piece begins anew, so figures differ a little from those of
    packed rows.
    """
    if tokens < 1:
        raise UserError(f"split_tokens must be at least 1, got {tokens}", exit_code=2)
    lengths, room, read = tokenizer.token_bytes(), model.config.sequence_len, 0
    rows: list[tuple[str, PromptRow]] = []
    for name, text in _documents(data):
        if read >= tokens:
            break
        found = tokenizer.encode(text)
        for start in range(0, len(found), room):
            rows.append((name, PromptRow(0, [tokenizer.bos, *found[start : start + room]], 1)))
        read += len(found)
    names = sorted({name for name, _ in rows})
    sums = {name: [0.0, 0.0, 0.0] for name in names}  # nats, tokens, bytes
    mine = rows[compute.rank :: compute.world_size]
    scored = (
        score_rows(model, [row for _, row in mine], tokenizer.bos, tokens_per_batch) if mine else []
    )
    for (name, row), one in zip(mine, scored, strict=True):
        size = float(lengths[row.tokens[1:]].sum())
        sums[name] = [
            a + b for a, b in zip(sums[name], (-one.logprob, one.tokens, size), strict=True)
        ]
    flat = parallel.total([value for name in names for value in sums[name]], compute)
    losses = {}
    for name, (nats, count, size) in zip(names, zip(*[iter(flat)] * 3, strict=True), strict=True):
        losses[name] = Loss(nats / (math.log(2) * size), nats / count, int(count), int(size))
    return losses
