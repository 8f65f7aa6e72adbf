"""Train the tokenizer of a corpus.

python -m scripts.tok_train                                    # on the only corpus
python -m scripts.tok_train --data fineweb --vocab_size 65536
python -m scripts.tok_train --export exported                  # also for tiktoken and Hugging Face's tokenizers
python -m scripts.tok_train --data web:0.7,books:0.3           # on a mixture; its weights may change later
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from nanochat.common import UserError, log, read_json, run, settings, write_json
from nanochat.data.corpora import shards
from nanochat.data.mixing import Data, resolve_data
from nanochat.data.shards import read_about, texts
from nanochat.report.sections import write_section
from nanochat.runtime.progress import Progress, duration
from nanochat.tokenizer import DEFAULT_PATTERN, FILE_NAME, PATTERNS, Tokenizer, tokenizer_dir

Auto = Literal["auto"]
SMALL_CORPUS = 50_000_000  # characters; a smaller corpus gets a small vocabulary, since its models are small too
NOTE = "training.json"  # beside tokenizer.json; with the same settings and shards, a second call trains nothing


@dataclass(frozen=True)
class Config:
    """Train the tokenizer of a corpus."""

    data: str | None = None
    """The corpus: its name, the folder it was imported from, or a mixture such as
    web:0.7,books:0.3. Default: the only corpus there is."""
    max_chars: int = 2_000_000_000
    """How many characters to read at most."""
    doc_cap: int = 10_000
    """How many characters to read from each document at most, so that a few long documents do not
    dominate."""
    vocab_size: int | Auto = "auto"
    """How many tokens the vocabulary has, including special tokens. auto: 32,768.
    For a corpus of less than 50 million characters: 4,096."""
    pattern: str = DEFAULT_PATTERN
    """How text is cut before merging. nanochat suits most text; han separates runs of Han letters
    from other text; han4 also cuts these runs after four letters, which compresses Chinese less
    (dev/LOG.md)."""
    export: Path | None = None
    """A folder for copies of the vocabulary: one for tiktoken, and tokenizer.json for Hugging
    Face's tokenizers. Default: no copies."""


@dataclass
class Used:
    """How much text the tokenizer was trained on."""

    shards: list[int]  # how many of each corpus
    documents: int = 0
    characters: int = 0


def sample(
    corpora: list[list[Path]], shares: Sequence[int], cfg: Config, used: Used
) -> Iterator[str]:
    """Documents cut to `doc_cap` characters, until `max_chars` characters are read; `used` counts
    them.

    Each of several corpora gives its share of the characters, until one of the corpora ends.
    """

    def read(k: int) -> Iterator[str]:
        for path in corpora[k]:
            used.shards[k] += 1
            yield from texts([path])

    readers, characters = [read(k) for k in range(len(corpora))], [0] * len(corpora)
    while used.characters < cfg.max_chars:
        k = min(range(len(readers)), key=lambda k: characters[k] / shares[k])
        text = next(readers[k], None)
        if text is None:
            return
        text = text[: cfg.doc_cap]
        characters[k] += len(text)
        used.characters += len(text)
        used.documents += 1
        yield text


def known_characters(data: Data) -> int | None:
    """How many characters a sample of all corpora can have; None if that is not known."""
    known = [
        read_about(corpus.folder).get("characters", {}).get("train") for corpus in data.corpora
    ]
    if None in known:
        return None
    return min(
        count * sum(data.shares) // share for count, share in zip(known, data.shares, strict=True)
    )


def identity(paths: list[Path]) -> list[list[Any]]:
    """The names, sizes and known SHA-256s of shards, which tell them from other shards with the
    same names."""
    known = read_about(paths[0].parent).get("shards", {}) if paths else {}
    return [
        [path.name, path.stat().st_size, known.get(path.name, {}).get("sha256")] for path in paths
    ]


def identities(corpora: list[list[Path]], counts: Sequence[int]) -> list[Any]:
    """The identity of the first `counts[k]` shards of each corpus k; for a single corpus, without
    the outer list."""
    each = [identity(paths[:count]) for paths, count in zip(corpora, counts, strict=True)]
    return each if len(each) > 1 else each[0]


def noted(cfg: Config, data: Data) -> dict[str, Any]:
    """The settings that belong to a tokenizer. The name of a single corpus is left out, since it
    names the folder."""
    kept = {name: value for name, value in settings(cfg).items() if name != "export"}
    return {**kept, "data": data.name if len(data.corpora) > 1 else None}


def export_folder(cfg: Config) -> Path | None:
    """Where --export writes to, None without the flag. UserError (code 2) if a file has this
    name."""
    if cfg.export is None:
        return None
    folder = cfg.export.expanduser()
    if not next(place for place in (folder, *folder.absolute().parents) if place.exists()).is_dir():
        raise UserError(
            f"--export must name a folder, got {folder}, which is a file or below one", exit_code=2
        )
    return folder


def export(tokenizer: Tokenizer, folder: Path | None) -> None:
    """Write the vocabulary in the formats of other libraries, if --export was given."""
    if folder is not None:
        log("exported: " + ", ".join(str(path) for path in tokenizer.export(folder)))


def choose_vocab_size(asked: int | Auto, characters: int | None) -> int:
    """The size that was asked for, or a size that suits the corpus, with the reason in the log."""
    if asked != "auto":
        return asked
    size = 4_096 if characters is not None and characters < SMALL_CORPUS else 32_768
    log(
        f"vocab_size: {size:,} (the corpus has {f'{characters:,}' if characters else 'many'} characters)"
    )
    return size


def compression(tokenizer: Tokenizer, data: Data, split: Literal["train", "val"]) -> float:
    """Bytes per token on the first 1,000 documents of each corpus. Also checks that decoding gives
    the same texts."""
    some = [text for corpus in data.corpora for text in islice(texts(shards(corpus, split)), 1_000)]
    tokens = tokenizer.encode_batch(some)
    if [tokenizer.decode(ids) for ids in tokens] != some:
        raise AssertionError("a text does not come back from its tokens")
    return sum(len(text.encode()) for text in some) / sum(map(len, tokens))


def done_before(
    folder: Path, cfg: Config, data: Data, corpora: list[list[Path]]
) -> Tokenizer | None:
    """The tokenizer that was trained with these settings on these shards, if there is one. Shards
    that were added since then do not matter."""
    if not (folder / NOTE).exists() or not (folder / FILE_NAME).exists():
        return None
    note = read_json(folder / NOTE)
    if note["settings"] != noted(cfg, data):
        return None
    counts = (
        [len(note["shards"])] if len(corpora) == 1 else [len(shards) for shards in note["shards"]]
    )
    if note["shards"] != identities(corpora, counts):
        return None
    tokenizer = Tokenizer.load(folder)
    return tokenizer if tokenizer.hash == note["tokenizer"] else None


class Merging:
    """Prints every ten seconds how many merges have been learned."""

    def __init__(self, progress: Progress):
        self._progress, self._told = progress, time.monotonic()

    def __call__(self, stage: str, done: int) -> None:
        if stage == "merge" and time.monotonic() - self._told >= 10:
            self._told = time.monotonic()
            self._progress.say(f"{done:,} merges learned")


def train(cfg: Config) -> Tokenizer:
    """Train, check and save the tokenizer, and write its section of the report; or find that all
    this is done."""
    for name in ("max_chars", "doc_cap"):
        if getattr(cfg, name) <= 0:
            raise UserError(
                f"--{name} must be positive, the most characters to read, got {getattr(cfg, name)}",
                exit_code=2,
            )
    if cfg.pattern not in PATTERNS:
        raise UserError(
            f"--pattern must be one of {', '.join(PATTERNS)}, got {cfg.pattern!r}", exit_code=2
        )
    exported = export_folder(cfg)
    data = resolve_data(cfg.data)
    corpora = [shards(corpus, "train") for corpus in data.corpora]
    folder, known = tokenizer_dir(data.vocabulary), known_characters(data)
    if tokenizer := done_before(folder, cfg, data, corpora):
        log(
            f"the tokenizer of {data.name} is already there: {tokenizer.vocab_size:,} tokens in {folder}"
        )
        export(tokenizer, exported)
        return tokenizer

    vocab_size = choose_vocab_size(cfg.vocab_size, known)
    used = Used([0] * len(corpora))
    start = time.monotonic()
    with Progress(
        f"read {data.name}", min(cfg.max_chars, known) if known else None, "characters"
    ) as progress:

        def counted() -> Iterator[str]:
            for text in sample(corpora, data.shares, cfg, used):
                yield text
                progress.advance(len(text))
            progress.say(f"merging to {vocab_size:,} tokens")

        tokenizer = Tokenizer.train(counted(), vocab_size, cfg.pattern, Merging(progress))
    seconds = time.monotonic() - start

    ratios = {split: compression(tokenizer, data, split) for split in ("train", "val")}
    tokenizer.save(folder)
    note = {
        "settings": noted(cfg, data),
        "shards": identities(corpora, used.shards),
        "tokenizer": tokenizer.hash,
    }
    write_json(folder / NOTE, note)
    lengths = tokenizer.token_bytes()
    lengths = lengths[lengths > 0]
    section = {
        "settings": {**noted(cfg, data), "data": data.name},
        "seconds": seconds,
        "shards": sum(used.shards),
        "documents": used.documents,
        "characters": used.characters,
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": ratios,
        "token_bytes": {
            "min": int(lengths.min()),
            "mean": float(lengths.mean()),
            "max": int(lengths.max()),
        },
        "tokenizer": tokenizer.hash,
    }
    write_section("tok_train", section)
    log(
        f"trained {tokenizer.vocab_size:,} tokens on {used.documents:,} documents "
        f"({used.characters:,} characters) in {duration(seconds)}; {ratios['val']:.2f} bytes per token on "
        f"held-out text; saved in {folder}"
    )
    export(tokenizer, exported)
    return tokenizer


if __name__ == "__main__":
    run(train, Config, __doc__)
