"""Train the tokenizer of a corpus.

python -m scripts.tok_train                                    # on the only corpus
python -m scripts.tok_train --data fineweb --vocab_size 65536
python -m scripts.tok_train --export exported                  # also for tiktoken and tokenizers
python -m scripts.tok_train --data web:0.7,books:0.3           # a mixture; weights may change later
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from nanochat.common import UserError, log, read_json, tr, write_json
from nanochat.data.command_line import given, run, settings
from nanochat.data.corpora import shards
from nanochat.data.mixing import Data, resolve_data
from nanochat.data.shards import read_about, texts
from nanochat.report.sections import write_section
from nanochat.runtime.progress import Progress, duration
from nanochat.tokenizer import DEFAULT_PATTERN, FILE_NAME, PATTERNS, Tokenizer, tokenizer_dir

Auto = Literal["auto"]
# In characters. A smaller corpus gets a small vocabulary, because its models are small too.
SMALL_CORPUS = 50_000_000
# A file next to tokenizer.json, which tells a second call with the same settings and shards that
# there is nothing to train.
NOTE = "training.json"
SETTINGS = ("max_chars", "doc_cap", "vocab_size", "pattern")  # flags that a tokenizer depends on
PROGRESS_SECONDS = 10
# A corpus of up to this many documents is kept in memory, because opening its shards again and
# again would take longer than reading them.
FEW_DOCUMENTS = 1_000


@dataclass(frozen=True)
class Config:
    """Train the tokenizer of a corpus."""

    data: str | None = None
    """The corpus: its name, the folder it was imported from, or a mixture: web:0.7,books:0.3.
    Default: the only corpus there is."""
    max_chars: int = 2_000_000_000
    """How many characters to read at most."""
    doc_cap: int = 10_000
    """How many characters to read from each document at most,
    so that a few long documents do not dominate."""
    vocab_size: int | Auto = "auto"
    """How many tokens the vocabulary has, including special tokens. auto: 32,768.
    For a corpus of less than 50 million characters: 4,096."""
    pattern: str = DEFAULT_PATTERN
    """How text is cut before merging.
    nanochat suits most text; han separates runs of Han letters from other text;
    han4 also cuts these runs after four letters, which compresses Chinese less (dev/LOG.md)."""
    export: Path | None = None
    """A folder for copies of the vocabulary:
    one for tiktoken, and tokenizer.json for Hugging Face's tokenizers.
    Without other settings, the tokenizer that is there is copied. Default: no copies."""


def train(cfg: Config) -> Tokenizer:
    """Train, check and save a tokenizer, report on it, and return the tokenizer.

    If a tokenizer of the same settings and shards is already saved, that one is returned instead,
    and so is any that is saved if --export is given and no setting.
    """
    _check(cfg)
    exported = export_folder(cfg)
    data = resolve_data(cfg.data)
    corpora = [shards(corpus, "train") for corpus in data.corpora]
    folder = tokenizer_dir(data.vocabulary)
    if exported and (folder / FILE_NAME).exists() and not given(cfg, SETTINGS):
        tokenizer = Tokenizer.load(folder)
    else:
        tokenizer = saved_tokenizer(folder, cfg, data, corpora)
    if tokenizer is not None:
        log(
            tr(
                "the tokenizer of {name} is already there: {vocab_size:,} tokens in {folder}",
                name=data.name,
                vocab_size=tokenizer.vocab_size,
                folder=folder,
            )
        )
        export(tokenizer, exported)
        return tokenizer

    if (folder / FILE_NAME).exists():
        log(
            tr(
                "the tokenizer in {folder} was trained with other settings or other text, and will "
                "be replaced; models that were trained with it keep a copy of their own",
                folder=folder,
            )
        )
    sizes = known_characters(data)
    vocab_size = choose_vocab_size(cfg.vocab_size, sum(sizes) if sizes else None)
    used = Used([0] * len(corpora))
    start = time.monotonic()
    total = characters_to_read(sizes, data.shares, cfg.max_chars) if sizes else None
    with Progress(tr("read {name}", name=data.name), total, tr("characters")) as progress:

        def counted() -> Iterator[str]:
            for text in sample(corpora, data.shares, cfg, used):
                yield text
                progress.advance(len(text))
            progress.say(tr("merging to {vocab_size:,} tokens", vocab_size=vocab_size))

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
    _report(cfg, data, tokenizer, used, seconds, ratios)
    log(
        tr(
            "trained {vocab_size:,} tokens on {documents:,} documents ({characters:,} "
            "characters) in {seconds}; {val:.2f} bytes per token on held-out text; saved in "
            "{folder}",
            vocab_size=tokenizer.vocab_size,
            documents=used.documents,
            characters=used.characters,
            seconds=duration(seconds),
            val=ratios["val"],
            folder=folder,
        )
    )
    export(tokenizer, exported)
    return tokenizer


def _check(cfg: Config) -> None:
    """Raise UserError (exit code 2) if a number is out of range or the pattern is unknown."""
    for name in ("max_chars", "doc_cap"):
        value = getattr(cfg, name)
        if value <= 0:
            raise UserError(
                tr(
                    "--{name} must be positive, the most characters to read, got {value}",
                    name=name,
                    value=value,
                ),
                exit_code=2,
            )
    if cfg.pattern not in PATTERNS:
        names = ", ".join(PATTERNS)
        raise UserError(
            tr(
                "--pattern must be one of {names}, got {pattern!r}",
                names=names,
                pattern=cfg.pattern,
            ),
            exit_code=2,
        )


# --- the text to learn from ----------------------------------------------------------------------


@dataclass
class Used:
    """The amount of text that the tokenizer was trained on."""

    shards: list[int]  # the number of shards of each corpus
    documents: int = 0
    characters: int = 0


def sample(
    corpora: list[list[Path]],
    shares: Sequence[int],
    cfg: Config,
    used: Used,
) -> Iterator[str]:
    """Yield documents to train on, and count them in `used`.

    Each is cut to `cfg.doc_cap` characters, and reading stops once `cfg.max_chars` characters are
    read. Each of several corpora gives its share of the characters. As in training, one that ends
    early is read again, until all have been read once.
    """
    unread = set(range(len(corpora)))

    def read_once(k: int) -> Iterator[str]:
        for number, path in enumerate(corpora[k], start=1):
            used.shards[k] = max(used.shards[k], number)
            for text in texts([path]):
                yield text[: cfg.doc_cap]

    def read(k: int) -> Iterator[str]:
        first_documents: list[str] = []
        for text in read_once(k):
            if len(first_documents) <= FEW_DOCUMENTS:
                first_documents.append(text)
            yield text
        unread.discard(k)
        while unread and first_documents:
            is_small = len(first_documents) <= FEW_DOCUMENTS
            yield from first_documents if is_small else read_once(k)

    readers = [read(k) for k in range(len(corpora))]
    characters = [0] * len(corpora)
    while used.characters < cfg.max_chars:
        # Read next from the corpus that is furthest behind its share.
        k = min(range(len(readers)), key=lambda k: characters[k] / shares[k])
        text = next(readers[k], None)
        if text is None:
            return
        characters[k] += len(text)
        used.characters += len(text)
        used.documents += 1
        yield text


def known_characters(data: Data) -> list[int] | None:
    """Return the characters of each corpus that are for training, or None if one is unknown."""
    sizes = []
    for corpus in data.corpora:
        characters = read_about(corpus.folder).get("characters", {}).get("train")
        if characters is None:
            return None
        sizes.append(characters)
    return sizes


def characters_to_read(sizes: Sequence[int], shares: Sequence[int], most: int) -> int:
    """Return about how many characters sample() reads of corpora with `sizes` characters."""
    to_end = [size * sum(shares) // share for size, share in zip(sizes, shares, strict=True)]
    return min(most, max(to_end))


def choose_vocab_size(requested: int | Auto, characters: int | None) -> int:
    """Return the requested vocabulary size or, for "auto", log and return a suitable one."""
    if requested != "auto":
        return requested
    size = 32_768
    if characters is not None and characters < SMALL_CORPUS:
        size = 4_096
    if characters:
        reason = tr("the corpus has {characters:,} characters", characters=characters)
    else:
        reason = tr("the corpus has many characters")
    log(tr("vocab_size: {size:,} ({reason})", size=size, reason=reason))
    return size


class Merging:
    """Prints the number of learned merges, at most every ten seconds."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._last_line = time.monotonic()

    def __call__(self, stage: str, count: int) -> None:
        if stage == "merge" and time.monotonic() - self._last_line >= PROGRESS_SECONDS:
            self._last_line = time.monotonic()
            self._progress.say(tr("{count:,} merges learned", count=count))


def compression(
    tokenizer: Tokenizer,
    data: Data,
    split: Literal["train", "val"],
) -> float:
    """Return the bytes per token on the first 1,000 documents of a split of each corpus.

    Raises AssertionError if a document does not come back when its tokens are decoded.
    """
    documents: list[str] = []
    for corpus in data.corpora:
        documents += islice(texts(shards(corpus, split)), 1_000)
    tokens = tokenizer.encode_batch(documents)
    if [tokenizer.decode(ids) for ids in tokens] != documents:
        raise AssertionError("a text does not come back from its tokens")
    num_bytes = sum(len(text.encode()) for text in documents)
    return num_bytes / sum(map(len, tokens))


# --- what was trained before ---------------------------------------------------------------------


def saved_tokenizer(
    folder: Path,
    cfg: Config,
    data: Data,
    corpora: list[list[Path]],
) -> Tokenizer | None:
    """Return the saved tokenizer if it was trained with these settings and shards, else None.

    Shards that were added since then do not matter.
    """
    if not (folder / NOTE).exists() or not (folder / FILE_NAME).exists():
        return None
    note = read_json(folder / NOTE)
    if note["settings"] != noted(cfg, data):
        return None
    by_corpus = [note["shards"]] if len(corpora) == 1 else note["shards"]
    counts = [len(entries) for entries in by_corpus]
    if note["shards"] != identities(corpora, counts):
        return None
    tokenizer = Tokenizer.load(folder)
    return tokenizer if tokenizer.hash == note["tokenizer"] else None


def noted(cfg: Config, data: Data) -> dict[str, Any]:
    """Return a dict of the settings that identify a tokenizer.

    For a single corpus, `data` is None, because the tokenizer's folder has the corpus's name.
    """
    noted_settings = dict(settings(cfg))
    noted_settings.pop("export", None)
    noted_settings["data"] = data.name if len(data.corpora) > 1 else None
    return noted_settings


def identities(corpora: list[list[Path]], counts: Sequence[int]) -> list[Any]:
    """Return a list with the list of identities of the first `counts[k]` shards of each corpus k.

    For a single corpus, the inner list is returned.
    """
    by_corpus = []
    for paths, count in zip(corpora, counts, strict=True):
        by_corpus.append(identity(paths[:count]))
    return by_corpus if len(by_corpus) > 1 else by_corpus[0]


def identity(paths: list[Path]) -> list[list[Any]]:
    """Return a list [name, size in bytes, SHA-256 or None] for each shard.

    Such a list tells the shard from others with the same name.
    """
    recorded = read_about(paths[0].parent).get("shards", {}) if paths else {}
    identities_of_shards = []
    for path in paths:
        sha256 = recorded.get(path.name, {}).get("sha256")
        identities_of_shards.append([path.name, path.stat().st_size, sha256])
    return identities_of_shards


# --- results -------------------------------------------------------------------------------------


def export_folder(cfg: Config) -> Path | None:
    """Return the folder that --export names, or None without that flag.

    Raises UserError (exit code 2) if the path is a file or below a file.
    """
    if cfg.export is None:
        return None
    folder = cfg.export.expanduser()
    paths = (folder, *folder.absolute().parents)
    nearest = next(path for path in paths if path.exists())
    if not nearest.is_dir():
        raise UserError(
            tr(
                "--export must name a folder, got {folder}, which is a file or below one",
                folder=folder,
            ),
            exit_code=2,
        )
    return folder


def export(tokenizer: Tokenizer, folder: Path | None) -> None:
    """Write the vocabulary to a folder in the formats of other libraries; None writes nothing."""
    if folder is not None:
        paths = tokenizer.export(folder)
        log(tr("exported: {paths}", paths=", ".join(map(str, paths))))


def _report(
    cfg: Config,
    data: Data,
    tokenizer: Tokenizer,
    used: Used,
    seconds: float,
    ratios: dict[str, float],
) -> None:
    """Write the tokenizer's section of the report."""
    lengths = tokenizer.token_bytes()
    lengths = lengths[lengths > 0]  # special tokens have no bytes
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


if __name__ == "__main__":
    run(train, Config, __doc__)
