"""Measures bits per byte by language and domain, to show which texts a model predicts well."""

import itertools
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from nanochat.common import UserError, tr
from nanochat.data.corpora import Corpus, dropped_documents, shards
from nanochat.data.mixing import Data
from nanochat.data.shards import texts
from nanochat.device import Compute
from nanochat.evals.likelihood import PromptRow, score_rows
from nanochat.evals.loss import Loss
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

SUMS_SHARE = 0.2  # a text with a larger share of digits and arithmetic signs counts as sums
_ARITHMETIC = re.compile(r"[0-9+*/=×÷<>-]")
# First word of a character's Unicode name -> the language or script that it counts for.
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
READ_CHARACTERS = 2_000  # the number of characters at the beginning that decide the domain


def domain(text: str) -> str:
    """Return "sums", "other", or the language or script that prevails at the beginning of a text.

    A text is "sums" if many of its characters are digits and arithmetic signs. A Chinese character
    counts three times, because it carries about as much meaning as three Latin letters. If kana
    make up more than about 1/30 of the total, the text counts as Japanese, which also uses Chinese
    characters.
    """
    beginning = text[:READ_CHARACTERS]
    characters = [character for character in beginning if not character.isspace()]
    arithmetic = len(_ARITHMETIC.findall(beginning))
    if characters and arithmetic / len(characters) > SUMS_SHARE:
        return "sums"
    counts: Counter[str] = Counter()
    for character, count in Counter(characters).items():
        if character.isalpha():
            script = unicodedata.name(character, "").split(" ")[0]
            language = SCRIPTS.get(script, "other")
            counts[language] += 3 * count if language == "zh" else count
    if not counts:
        return "other"
    if counts["ja"] * 10 > counts.total() // 3:
        return "ja"
    return counts.most_common(1)[0][0]


def _named_documents(prefix: str, corpus: Corpus) -> Iterator[tuple[str, str]]:
    """Yield the validation documents of a corpus as (domain, text), without those left out of it."""
    for path in shards(corpus, "val"):
        dropped = dropped_documents(path)
        for number, text in enumerate(texts([path])):
            if number not in dropped:
                yield prefix + domain(text), text


def _documents(data: Data) -> Iterator[tuple[str, str]]:
    """Yield the validation documents as (domain, text), taking one from each corpus in turn.

    If there are several corpora, the domain begins with the name of the corpus.
    """
    streams = []
    for corpus in data.corpora:
        prefix = f"{corpus.name}: " if len(data.corpora) > 1 else ""
        streams.append(_named_documents(prefix, corpus))
    for group in itertools.zip_longest(*streams):
        yield from (document for document in group if document is not None)


def _domain_rows(
    data: Data,
    tokenizer: Tokenizer,
    tokens: int,
    row_length: int,
) -> list[tuple[str, PromptRow]]:
    """Return (domain, row) pairs for about the first `tokens` tokens of the validation split."""
    rows: list[tuple[str, PromptRow]] = []
    tokens_read = 0
    for name, text in _documents(data):
        if tokens_read >= tokens:
            break
        ids = tokenizer.encode(text)
        for start in range(0, len(ids), row_length):
            row_ids = [tokenizer.bos, *ids[start : start + row_length]]
            rows.append((name, PromptRow(0, row_ids, 1)))
        tokens_read += len(ids)
    return rows


@dataclass
class _Sums:
    nats: float = 0.0
    tokens: float = 0.0
    bytes: float = 0.0


def evaluate_domains(
    model: Model,
    tokenizer: Tokenizer,
    data: Data,
    tokens: int,
    tokens_per_batch: int,
    compute: Compute,
    row_tokens: int | None = None,
) -> dict[str, Loss]:
    """Return a dict from domain to loss, for about the first `tokens` validation tokens.

    The ranks divide the rows. Documents that are longer than `row_tokens`, by default the context,
    are cut, and each part is read without the parts before it, so results differ slightly from
    those of packed rows. Raises UserError (exit code 2) if `tokens` is less than 1.
    """
    if tokens < 1:
        raise UserError(
            tr("split_tokens must be at least 1, got {tokens}", tokens=tokens), exit_code=2
        )
    if row_tokens is None:
        row_tokens = model.config.sequence_len
    named_rows = _domain_rows(data, tokenizer, tokens, row_tokens)
    names = sorted({name for name, _ in named_rows})
    sums = {name: _Sums() for name in names}
    token_bytes = tokenizer.token_bytes()
    rank_rows = named_rows[compute.rank :: compute.world_size]
    rows = [row for _, row in rank_rows]
    scores = score_rows(model, rows, tokenizer.bos, tokens_per_batch) if rows else []
    for (name, row), score in zip(rank_rows, scores, strict=True):
        sums[name].nats -= score.logprob
        sums[name].tokens += score.tokens
        sums[name].bytes += float(token_bytes[row.tokens[1:]].sum())
    flat = [value for name in names for value in astuple(sums[name])]
    totals = iter(parallel.total(flat, compute))
    losses = {}
    for name in names:
        nats, count, size = next(totals), next(totals), next(totals)
        bits_per_byte = nats / (math.log(2) * size)
        losses[name] = Loss(bits_per_byte, nats / count, int(count), int(size))
    return losses
