"""Trains or encodes with one tokenizer in a process of its own, for bench.tokenizer."""

import base64
import hashlib
import importlib
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench import child
from nanochat.data import bpe

Task = dict[str, Any]
Encode = Callable[[list[str]], Iterable[list[int]]]  # texts -> the ids of each

BLOCK = 1 << 20
SEPARATOR = b"\0"
DOCUMENT = 10_000  # characters
GROUP = 5  # documents that an encoder gets in one call
MAX_BYTES = 30_000_000  # of a text to encode: more than a second of any peer's time


def documents(paths: Sequence[str]) -> Iterator[str]:
    """Yield the documents of these files of the corpus, read one block at a time."""
    for path in paths:
        unfinished = b""
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                *complete, unfinished = (unfinished + block).split(SEPARATOR)
                for document in complete:
                    yield document.decode()
        if unfinished:
            yield unfinished.decode()


def sample(paths: Sequence[str], max_bytes: int) -> list[str]:
    """Return documents spread over the files in random order, cut to DOCUMENT letters."""
    size = sum(Path(path).stat().st_size for path in paths)
    every = max(1, round(size / max_bytes))
    pieces = []
    for text in itertools.islice(documents(paths), 0, None, every):
        for start in range(0, len(text), DOCUMENT):
            pieces.append(text[start : start + DOCUMENT])
    random.Random(0).shuffle(pieces)
    return pieces


def digest_of(items: Iterable[bytes]) -> str:
    """Return a hash of byte strings, in their order."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(len(item).to_bytes(8, "little"))
        digest.update(item)
    return digest.hexdigest()


def size_of(texts: Iterable[str]) -> int:
    """Return the bytes of texts."""
    return sum(len(text.encode()) for text in texts)


def train_rustbpe(texts: Iterable[str], task: Task) -> list[bytes]:
    """Train with our rustbpe or karpathy's: both have the same names."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, task["vocab_size"], pattern=task["pattern"])
    return [bytes(token) for token, _ in tokenizer.get_mergeable_ranks()]


def train_tokenizers(texts: Iterable[str], task: Task) -> list[bytes]:
    """Train with Hugging Face tokenizers and the same split pattern."""
    library = importlib.import_module("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    split = library.pre_tokenizers.Split(library.Regex(task["pattern"]), "isolated")
    to_bytes = byte_level(add_prefix_space=False, use_regex=False)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([split, to_bytes])
    trainer = library.trainers.BpeTrainer(
        vocab_size=task["vocab_size"],
        show_progress=False,
        initial_alphabet=byte_level.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    return [token.encode() for token in sorted(vocabulary, key=vocabulary.get)]


def training_texts(task: Task) -> Iterable[str]:
    """Return about `max_bytes` of the documents; without a limit all, while they are read."""
    if task["max_bytes"] is None:
        return documents(task["files"])
    return sample(task["files"], task["max_bytes"])


def train(task: Task) -> dict[str, Any]:
    """Train once."""
    texts = training_texts(task)
    trainer = train_tokenizers if task["side"] == "tokenizers" else train_rustbpe
    tokens, seconds = child.timed(lambda: trainer(texts, task))
    if task["side"] == "ours":
        Path(task["ranks"]).write_text(bpe.tiktoken_file(tokens))
    return {
        "bytes": size_of(training_texts(task)),
        "cpu": seconds,
        "digest": digest_of(tokens),
    }


def read_ranks(path: str) -> list[bytes]:
    """Return the tokens of a tiktoken file, by rank."""
    lines = Path(path).read_text().splitlines()
    return [base64.b64decode(line.split()[0]) for line in lines]


def ours(ranks: list[bytes], task: Task) -> Encode:
    """Return an encoder of this repository's rustbpe, which gives lists like the peers'."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer.from_ranks(ranks, task["pattern"])
    return lambda texts: tokenizer.batch_encode(texts, threads=1)


def tiktoken(ranks: list[bytes], task: Task) -> Encode:
    """Return an encoder of tiktoken, from the same ranks and split pattern."""
    library = importlib.import_module("tiktoken")
    encoding = library.Encoding("bench", **bpe.tiktoken_arguments(ranks, task["pattern"], {}))
    return lambda texts: [encoding.encode_ordinary(text) for text in texts]


def tokenizers(ranks: list[bytes], task: Task) -> Encode:
    """Return an encoder of Hugging Face tokenizers, from our vocabulary as tokenizer.json."""
    library = importlib.import_module("tokenizers")
    tokenizer = library.Tokenizer.from_file(task["json"])

    def encode(texts: list[str]) -> list[list[int]]:
        batch = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    return encode


def constructor(task: Task) -> Callable[[], Encode]:
    """Return what makes a new encoder; what a program has before, such as tokens, is read first.

    karpathy's rustbpe cannot load a vocabulary, so it trains once and each new encoder is the same.
    """
    if task["side"] == "rustbpe":
        import rustbpe

        tokenizer = rustbpe.Tokenizer()
        texts = training_texts(task)
        tokenizer.train_from_iterator(texts, task["vocab_size"], pattern=task["pattern"])
        return lambda: tokenizer.batch_encode
    importlib.import_module("rustbpe" if task["side"] == "ours" else task["side"])
    make = {"ours": ours, "tiktoken": tiktoken, "tokenizers": tokenizers}[task["side"]]
    return partial(make, read_ranks(task["ranks"]), task)


def encode(task: Task) -> dict[str, Any]:
    """Encode each text `repeats` times cold, with a new encoder, and warm, with the same again.

    `texts` maps names to files, and `groups` to numbers of groups of documents. For a text without
    a number, a first cold pass ends after `seconds` CPU seconds, and the repeats encode its groups.
    """
    make = constructor(task)
    answers = {}
    for name, paths in task["texts"].items():
        pieces = sample(paths, MAX_BYTES)
        groups = [pieces[start : start + GROUP] for start in range(0, len(pieces), GROUP)]
        count = task["groups"].get(name)
        if count is None:
            count = encode_once(make, groups, task["seconds"])["groups"]
        answers[name] = [encode_once(make, groups[:count]) for _ in range(task["repeats"])]
    return answers


def encode_once(
    make: Callable[[], Encode], groups: list[list[str]], seconds: float = math.inf
) -> dict[str, Any]:
    """Make an encoder and encode the groups with it, or as many as it can in `seconds`."""
    encoder, construction = child.timed(make)
    rows: list[list[int]] = []
    count = 0
    cold = construction
    for group in groups:
        ids, group_seconds = child.timed(partial(encoder, group))
        rows += ids
        count += 1
        cold += group_seconds
        if cold - construction >= seconds:
            break
    warm = sum(child.seconds_of(partial(encoder, group)) for group in groups[:count])
    return {
        "groups": count,
        "bytes": size_of(itertools.chain.from_iterable(groups[:count])),
        "tokens": sum(map(len, rows)),
        "cold": cold,
        "warm": warm,
        "digest": digest_of(array("I", row).tobytes() for row in rows),
    }


def main() -> None:
    """Do the work of the task and answer."""
    answer = child.answers()
    task = child.task()
    work = {"train": train, "encode": encode}[task["work"]]
    answer(work(task))


if __name__ == "__main__":
    main()
