"""Runs one side of bench.tokenizer in its own process; PYTHONPATH decides whose package it imports.

The first argument is the task as JSON, and the answer is one line of JSON. Only bench.tokenizer starts this file.
"""

import base64
import hashlib
import importlib
import itertools
import json
import os
import random
import resource
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
SEPARATOR = "\0"
DOCUMENT = 10_000  # characters
GROUP = 5  # documents that an encoder gets in one call
MOST_BYTES = 30_000_000  # of a text to encode: more than a second of any peer's time


def documents(paths: Sequence[str]) -> Iterator[str]:
    """The documents of these files of the corpus, read one block at a time."""
    for path in paths:
        rest = b""
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                *whole, rest = (rest + block).split(SEPARATOR.encode())
                for document in whole:
                    yield document.decode()
        if rest:
            yield rest.decode()


def spread(task: dict[str, Any]) -> list[str]:
    """Documents spread over the files of a task in random order, about `most_bytes` in all, cut to DOCUMENT letters."""
    size = sum(Path(file).stat().st_size for file in task["files"])
    every = max(1, round(size / task["most_bytes"]))
    chosen = (text for number, text in enumerate(documents(task["files"])) if number % every == 0)
    cut = [
        text[start : start + DOCUMENT] for text in chosen for start in range(0, len(text), DOCUMENT)
    ]
    random.Random(0).shuffle(cut)
    return cut


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """The result of `work`, with its CPU seconds over all threads and its wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    return result, {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall}


def digest(parts: Iterable[bytes]) -> str:
    """One hash over many byte strings and the borders between them."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little") + part)
    return whole.hexdigest()


# --- training: returns the tokens in the order they were learned ------------------------------------------


def train_rustbpe(task: dict[str, Any], texts: Iterable[str]) -> list[bytes]:
    """Train with our rustbpe or karpathy's: both have the same names, and PYTHONPATH decides which is imported."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(texts, task["vocab_size"], pattern=task["pattern"])
    return [bytes(token) for token, _ in tokenizer.get_mergeable_ranks()]


def train_tokenizers(task: dict[str, Any], texts: Iterable[str]) -> list[bytes]:
    """Train with Hugging Face tokenizers and the same split pattern."""
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(task["pattern"]), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=task["vocab_size"],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    ranks = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [
        token.encode() for token, _ in ranks
    ]  # bytes are spelled as letters, so only the number is compared


def train_gigatoken(task: dict[str, Any], _: Iterable[str]) -> list[bytes]:
    """Train with gigatoken, which supports only its own split pattern, and reads whole files itself."""
    gigatoken = importlib.import_module("gigatoken")
    source = gigatoken.TextFileSource(task["files"], separator=SEPARATOR)
    trained = gigatoken.train_bpe(source, task["vocab_size"], [])
    return [str(len(trained)).encode()]


TRAINERS = {
    "ours": train_rustbpe,
    "rustbpe": train_rustbpe,
    "tokenizers": train_tokenizers,
    "gigatoken": train_gigatoken,
}


def train(task: dict[str, Any]) -> dict[str, Any]:
    """Train once: on all documents of the files, read meanwhile, or on those of `most_bytes`, read before.

    `peak` is the peak memory of the whole process in bytes.
    """
    texts = spread(task) if task["most_bytes"] else documents(task["files"])
    size = (
        sum(len(text.encode()) for text in texts)
        if isinstance(texts, list)
        else sum(map(size_of, task["files"]))
    )
    tokens, seconds = timed(lambda: TRAINERS[task["side"]](task, texts))
    answer = {
        **seconds,
        "bytes": size,
        "peak": peak(),
        "tokens": len(tokens),
        "digest": digest(tokens),
    }
    if task["ranks"]:
        write_ranks(Path(task["ranks"]), tokens)
    return answer


def size_of(file: str) -> int:
    """The bytes of a file."""
    return Path(file).stat().st_size


# --- encoding: ids of every document ----------------------------------------------------------------------

Encode = Callable[[list[str]], Any]  # returns an iterable with the ids of each text


def write_ranks(path: Path, tokens: Sequence[bytes]) -> None:
    """Write a vocabulary in tiktoken's format: a line with base64 and rank for each token."""
    path.write_text(
        "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    )


def read_ranks(path: str) -> list[bytes]:
    """Read the tokens that write_ranks wrote, by rank."""
    return [base64.b64decode(line.split()[0]) for line in Path(path).read_text().splitlines()]


class Rows:
    """A flat array of ids and the ends of its rows, as an iterable of rows."""

    def __init__(self, ids: Any, ends: Any):
        self.ids, self.ends = ids, ends

    def __iter__(self) -> Iterator[Any]:
        start = 0
        for end in self.ends.tolist():
            yield self.ids[start:end]
            start = end

    def __len__(self) -> int:
        return len(self.ends)


def encoder_ours(ranks: list[bytes], task: dict[str, Any]) -> Encode:
    """Encode with this repository's rustbpe, into lists like those of the peers."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer.from_ranks(ranks, task["pattern"])
    return lambda texts: tokenizer.batch_encode(texts, threads=task["threads"])


def encoder_numpy(ranks: list[bytes], task: dict[str, Any]) -> Encode:
    """Encode with this repository's rustbpe, into numpy arrays."""
    import rustbpe

    tokenizer = rustbpe.Tokenizer.from_ranks(ranks, task["pattern"])

    def encode(texts: list[str]) -> Rows:
        ids, ends = tokenizer.batch_encode_numpy(texts, threads=task["threads"])
        return Rows(ids, ends)

    return encode


def encoder_tiktoken(ranks: list[bytes], task: dict[str, Any]) -> Encode:
    """Encode with tiktoken, from the same ranks and split pattern."""
    tiktoken = importlib.import_module("tiktoken")
    numbers = {token: rank for rank, token in enumerate(ranks)}
    encoding = tiktoken.Encoding(
        "bench", pat_str=task["pattern"], mergeable_ranks=numbers, special_tokens={}
    )
    if task["threads"] == 1:
        return lambda texts: [encoding.encode_ordinary(text) for text in texts]
    return lambda texts: encoding.encode_ordinary_batch(texts, num_threads=task["threads"])


def encoder_tokenizers(_: list[bytes], task: dict[str, Any]) -> Encode:
    """Encode with Hugging Face tokenizers, from our vocabulary exported as tokenizer.json."""
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(task["json"])
    return lambda texts: [
        found.ids for found in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ]


def encoder_gigatoken(_: list[bytes], task: dict[str, Any]) -> Encode:
    """Encode with gigatoken, from the same ranks and with GPT-4's pattern, which it calls gpt4."""
    gigatoken = importlib.import_module("gigatoken")
    tokenizer = gigatoken.Tokenizer.from_tiktoken(task["ranks"], pretokenizer="gpt4")
    return lambda texts: tokenizer.encode_batch(texts, parallel=task["threads"] > 1)


ENCODERS: dict[str, Callable[[list[bytes], dict[str, Any]], Encode]] = {
    "ours": encoder_ours,
    "numpy": encoder_numpy,
    "tiktoken": encoder_tiktoken,
    "tokenizers": encoder_tokenizers,
    "gigatoken": encoder_gigatoken,
}


def constructor(task: dict[str, Any]) -> Callable[[], Encode]:
    """What makes a new encoder of a side. What a program would have before, such as the tokens, is read first.

    karpathy's rustbpe cannot load a vocabulary, so it trains once and each new encoder is the same one.
    """
    if task["side"] != "rustbpe":
        ranks = read_ranks(task["ranks"])
        return lambda: ENCODERS[task["side"]](ranks, task)
    import rustbpe

    tokenizer, training = rustbpe.Tokenizer(), task["learned_from"]
    texts = spread(training) if training["most_bytes"] else documents(training["files"])
    tokenizer.train_from_iterator(texts, task["vocab_size"], pattern=task["pattern"])
    return lambda: tokenizer.batch_encode


def encode(task: dict[str, Any]) -> dict[str, Any]:
    """For each text: encode it `repeats` times cold, with a new encoder, and warm, with the same encoder again.

    `texts` maps names to files and to the number of groups of documents. If that is None, the first cold pass ends
    after `seconds` CPU seconds, and the repeats encode the groups of that pass.
    """
    import numpy  # noqa: F401 # so that its import is not measured

    make = constructor(task)
    importlib.import_module({"ours": "rustbpe", "numpy": "rustbpe"}.get(task["side"], task["side"]))
    found = {}
    for name, text in task["texts"].items():
        texts = spread({**text, "most_bytes": MOST_BYTES})
        groups = [texts[start : start + GROUP] for start in range(0, len(texts), GROUP)]
        if text["groups"] is None:
            work = partial(once, make, groups, task["seconds"], warm=False)
            groups = groups[: apart(task["side"], work)["groups"]]
        else:
            groups = groups[: text["groups"]]
        work = partial(once, make, groups, None)
        found[name] = [apart(task["side"], work) for _ in range(task["repeats"])]
    return found


def once(
    make: Callable[[], Encode], groups: list[list[str]], seconds: float | None, warm: bool = True
) -> Any:
    """Make an encoder and encode the groups with it, or as many as it can in `seconds` CPU seconds."""
    encoder, construction = timed(make)
    rows, spent = [], 0.0
    for group in groups:
        ids, taken = timed(partial(encoder, group))
        rows.append(ids)
        spent += taken["cpu"]
        if seconds is not None and spent >= seconds:
            break
    again = sum(timed(partial(encoder, group))[1]["cpu"] for group in groups) if warm else 0.0
    size = sum(len(text.encode()) for group in groups[: len(rows)] for text in group)
    return {
        "groups": len(rows),
        "bytes": size,
        "construction": construction["cpu"],
        "cold": construction["cpu"] + spent,
        "encode": spent,
        "warm": again,
        **content(rows),
    }


def content(rows: Iterable[Any]) -> dict[str, Any]:
    """The number of tokens in these groups of documents, and a digest of them all."""
    import numpy as np

    found, count = hashlib.sha256(), 0
    for row in itertools.chain.from_iterable(rows):
        numbers = array("I", row) if isinstance(row, list) else np.asarray(row, dtype=np.uint32)
        count += len(numbers)
        found.update(len(numbers).to_bytes(8, "little") + numbers.tobytes())
    return {"tokens": count, "digest": found.hexdigest()}


def apart(side: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The answer of `work`, done by a copy of this process, which nothing that was encoded before has warmed.

    karpathy's rustbpe works here: its threads do not survive a fork, and it keeps nothing from text to text.
    """
    if side == "rustbpe":
        return work()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as answers:
            json.dump(work(), answers)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answers:
        said = answers.read()
    os.waitpid(child, 0)
    return json.loads(said)


def run_of_han(task: dict[str, Any]) -> dict[str, Any]:
    """Compare a run of a million Han letters with the text that the letters come from, in CPU seconds per byte."""
    texts = spread({**task, "most_bytes": MOST_BYTES})
    letters = (letter for text in texts for letter in text if "\u4e00" <= letter <= "\u9fff")
    run = "".join(itertools.islice(itertools.cycle(letters), 1_000_000))
    encoder = constructor(task)()
    encoder(["import numpy"])
    _, normal = timed(lambda: encoder(texts))
    _, alone = timed(lambda: encoder([run]))
    size = sum(len(text.encode()) for text in texts)
    return {"letters": len(run), "ratio": alone["cpu"] / len(run.encode()) / (normal["cpu"] / size)}


def peak() -> int:
    """The peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def main() -> None:
    """Print the answer to standard output; whatever a peer prints is sent to standard error instead."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    work = {"train": train, "encode": encode, "run_of_han": run_of_han}[task["work"]]
    print(json.dumps(work(task)), file=answers, flush=True)


if __name__ == "__main__":
    main()
