"""rustbpe against a slow reference, the published rustbpe and tiktoken; its API; and processes that use it."""

import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import rustbpe
import tiktoken

from tests.support.rustbpe_texts import GPT4, NANOCHAT, PATTERNS, hostile_texts, texts_of, trained

ROOT = Path(__file__).resolve().parent.parent.parent
PUBLISHED = "0.1.0"


def replaced(ids: tuple[int, ...], pair: tuple[int, int], token: int) -> tuple[int, ...]:
    out: list[int] = []
    index = 0
    while index < len(ids):
        if ids[index : index + 2] == pair:
            out.append(token)
            index += 2
        else:
            out.append(ids[index])
            index += 1
    return tuple(out)


def slow_ranks(texts: list[str], vocab_size: int, pattern: str) -> list[tuple[bytes, int]]:
    """Byte pair encoding as a textbook explains it: count all pairs again for each merge."""
    words = Counter(tuple(piece.encode()) for text in texts for piece in regex.findall(pattern, text))
    tokens = [bytes([value]) for value in range(256)]
    while len(tokens) < vocab_size:
        pairs: Counter[tuple[int, int]] = Counter()
        for ids, count in words.items():
            for pair in itertools.pairwise(ids):
                pairs[pair] += count
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        words = Counter({replaced(ids, best, len(tokens)): count for ids, count in words.items()})
        tokens.append(tokens[best[0]] + tokens[best[1]])
    return [(token, rank) for rank, token in enumerate(tokens)]


# --- what it learns ------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("vocab_size", [256, 257, 300, 500])
def test_merges_equal_a_slow_reference(vocab_size: int, pattern: str) -> None:
    texts = texts_of(seed=vocab_size, count=40)
    assert trained(texts, vocab_size, pattern).get_mergeable_ranks() == slow_ranks(texts, vocab_size, pattern)


@pytest.mark.parametrize("alphabet", ["a", "ab", "abc", "汉字", "a汉😀"])
def test_merges_equal_a_slow_reference_where_pairs_overlap(alphabet: str) -> None:
    rng = random.Random(7)
    for _ in range(20):
        texts = ["".join(rng.choice(alphabet) * rng.randrange(1, 7) for _ in range(6)) for _ in range(5)]
        assert trained(texts, 400, r"(?s).+").get_mergeable_ranks() == slow_ranks(texts, 400, r"(?s).+")


PUBLISHED_JOB = """
import json, sys
import rustbpe
for line in sys.stdin:
    job = json.loads(line)
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter(job["texts"]), job["vocab_size"], pattern=job["pattern"])
    ranks = [token.hex() for token, rank in tokenizer.get_mergeable_ranks()]
    print(json.dumps({"file": rustbpe.__file__, "ranks": ranks, "ids": tokenizer.batch_encode(job["held_out"])}))
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rustbpe of the package index, which must not be imported into this process."""
    folder = tmp_path_factory.mktemp("published_rustbpe")
    wheel = ["--quiet", "--no-deps", "--target", str(folder), f"rustbpe=={PUBLISHED}"]
    reason = ""
    for tool in (["uv", "pip", "install", "--python", sys.executable], ["pip", "install"]):
        command = [sys.executable, "-m", *tool, *wheel]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            reason = f"{tool[0]} waited 120 seconds"
            continue
        if result.returncode == 0:
            return folder
        reason = result.stderr.strip()[-300:]
    reason = f"rustbpe {PUBLISHED} could not be installed from the package index: {reason}"
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def test_merges_and_ids_equal_the_published_rustbpe(published: Path) -> None:
    held_out = texts_of(seed=99, count=200)
    sizes = [(256, 20), (257, 20), (300, 100), (1000, 300), (4000, 600), (9000, 300), (100_000, 30)]
    jobs = [
        {"texts": texts_of(seed, count), "vocab_size": size, "pattern": pattern, "held_out": held_out}
        for pattern in (GPT4, NANOCHAT, None)
        for seed, (size, count) in enumerate(sizes)
    ]
    hostile = hostile_texts(seed=1)
    jobs += [{"texts": hostile, "vocab_size": size, "pattern": NANOCHAT, "held_out": held_out} for size in (400, 4000)]
    result = subprocess.run(
        [sys.executable, "-c", PUBLISHED_JOB],
        input="\n".join(json.dumps(job) for job in jobs),
        env={**os.environ, "PYTHONPATH": str(published), "RAYON_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == len(jobs)
    for job, answer in zip(jobs, answers, strict=True):
        assert answer["file"].startswith(str(published)), "our own module must not be compared with itself"
        ours = trained(job["texts"], job["vocab_size"], job["pattern"])
        assert [token.hex() for token, _ in ours.get_mergeable_ranks()] == answer["ranks"]
        assert ours.batch_encode(held_out) == answer["ids"]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_ids_equal_tiktoken(pattern: str) -> None:
    ours = trained(texts_of(seed=1, count=800), 3000, pattern)
    ranks = dict(ours.get_mergeable_ranks())
    theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    rng = random.Random(2)
    runs = ["".join(rng.choices("汉字说", k=3000)), "ab" * 5000, "the" * 500, "!?" * 300, " \n" * 500]
    for text in texts_of(seed=3, count=800) + hostile_texts(seed=2) + runs:
        ids = ours.encode(text)
        assert ids == theirs.encode_ordinary(text)
        assert ours.encode_ordinary(text) == ids
        assert ours.decode(ids) == text


def test_merges_do_not_depend_on_buffers_threads_or_the_order_of_texts() -> None:
    texts = texts_of(seed=4, count=300)
    ranks = trained(texts, 1500).get_mergeable_ranks()
    assert trained(texts, 1500, buffer_size=1).get_mergeable_ranks() == ranks
    assert trained(texts, 1500, buffer_size=2**64 - 1).get_mergeable_ranks() == ranks
    assert trained(texts[::-1], 1500, buffer_size=7).get_mergeable_ranks() == ranks


def test_training_ends_early_when_no_pair_is_left() -> None:
    tokenizer = trained(["abab", "ab"], 2**31 - 1)
    assert tokenizer.get_mergeable_ranks()[256:] == [(b"ab", 256), (b"abab", 257)]
    assert tokenizer.vocab_size == 258
    assert trained([], 1000).vocab_size == 256


def test_a_run_of_half_a_million_letters_encodes() -> None:
    tokenizer = trained(["汉字" * 50], 300)
    text = "汉字汉" * 170_000
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_long_texts_are_encoded_in_parts_with_the_same_tokens() -> None:
    tokenizer = trained(texts_of(seed=1, count=300), 900)
    text = "".join(hostile_texts(seed=3)) * 600
    assert len(text.encode()) > 2 << 22, "several parts"
    ids = tokenizer.batch_encode([text])[0]
    assert tokenizer.encode(text) == ids
    assert (tokenizer.encode_numpy(text) == np.array(ids)).all()


def test_a_long_text_takes_little_more_memory_than_its_tokens() -> None:
    code = """
import resource, rustbpe
tokenizer = rustbpe.Tokenizer()
tokenizer.train_from_iterator([], 256)
text = "a " * 8_000_000
tokenizer.encode_numpy(text[:1000])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(tokenizer.encode_numpy(text)) == len(text)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / (2 * len(text)))
"""
    assert float(run(code, "-c")) < 2.5, "bytes for each byte of the tokens, which are uint16"


# --- its API -------------------------------------------------------------------------------------


def test_a_new_tokenizer_knows_the_bytes() -> None:
    tokenizer = rustbpe.Tokenizer()
    assert tokenizer.vocab_size == 256
    assert tokenizer.get_pattern() == ""
    assert tokenizer.get_mergeable_ranks() == [(bytes([value]), value) for value in range(256)]
    assert tokenizer.decode([104, 105]) == "hi"
    with pytest.raises(ValueError, match="train_from_iterator first"):
        tokenizer.encode("hi")


def test_training_again_replaces_the_merges() -> None:
    tokenizer = trained(["abab"], 300)
    assert tokenizer.get_pattern() == GPT4
    tokenizer.train_from_iterator(["cdcd"], 257, 8192, NANOCHAT)
    assert tokenizer.get_pattern() == NANOCHAT
    assert tokenizer.get_mergeable_ranks()[256:] == [(b"cd", 256)]


def test_batches_equal_single_texts_in_order() -> None:
    tokenizer = trained(texts_of(seed=5, count=200), 600)
    texts = [*texts_of(seed=6, count=3000), ""]
    assert tokenizer.batch_encode(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.batch_encode(iter(texts[:3])) == tokenizer.batch_encode(texts)[:3]
    assert tokenizer.batch_encode([]) == []


def test_special_looking_text_is_text() -> None:
    tokenizer = trained(["<|bos|>"] * 9, 300)
    assert tokenizer.decode(tokenizer.encode("<|bos|><|endoftext|>")) == "<|bos|><|endoftext|>"


def test_threads_may_share_a_tokenizer_even_while_it_trains() -> None:
    tokenizer = trained(texts_of(seed=8, count=100), 500)
    ranks, texts = tokenizer.get_mergeable_ranks(), texts_of(seed=9, count=300)
    before = [tokenizer.encode(text) for text in texts]
    results: list[list[list[int]]] = []

    def texts_while_others_encode() -> Iterator[str]:
        workers = [threading.Thread(target=lambda: results.append(tokenizer.batch_encode(texts))) for _ in range(3)]
        for worker in workers:
            worker.start()
        yield "x" * 100
        assert tokenizer.get_mergeable_ranks() == ranks, "the new merges appear only when training ends"
        for worker in workers:
            worker.join()

    tokenizer.train_from_iterator(texts_while_others_encode(), 258)
    assert results == [before] * 3
    assert tokenizer.get_mergeable_ranks()[256:] == [(b"xx", 256), (b"xxxx", 257)]


def test_numpy_gives_the_same_tokens() -> None:
    texts = [*texts_of(seed=6, count=2000), ""]
    values = [bytes([value]) for value in range(256)]
    many = rustbpe.Tokenizer.from_ranks([*values, *(first + second for first in values for second in values)], GPT4)
    for tokenizer, dtype in ((trained(texts_of(seed=5, count=200), 600), np.uint16), (many, np.uint32)):
        expected = tokenizer.batch_encode(texts)
        for threads in (None, 1, 3):
            ids, ends = tokenizer.batch_encode_numpy(texts, threads)
            assert ids.dtype == dtype and ends.dtype == np.uint64
            assert [part.tolist() for part in np.split(ids, ends[:-1].astype(int))] == expected
        assert tokenizer.encode_numpy(texts[3]).tolist() == expected[3]
    assert [len(array) for array in many.batch_encode_numpy([])] == [0, 0]


def test_the_tokens_of_a_tokenizer_make_the_same_tokenizer() -> None:
    tokenizer = trained(texts_of(seed=5, count=400), 2000, NANOCHAT)
    ranks = [token for token, _ in tokenizer.get_mergeable_ranks()]
    again = rustbpe.Tokenizer.from_ranks(ranks, NANOCHAT)
    assert (again.get_merges() == tokenizer.get_merges()).all() and again.get_pattern() == NANOCHAT
    made = [ranks[left] + ranks[right] for left, right in tokenizer.get_merges().tolist()]
    assert made == ranks[256:]
    small = rustbpe.Tokenizer.from_ranks(ranks, NANOCHAT, cache_bytes=0)
    texts = texts_of(seed=6, count=500)
    assert again.batch_encode(texts) == small.batch_encode(texts) == tokenizer.batch_encode(texts)


def test_pickles_are_the_same_tokenizer() -> None:
    for tokenizer in (rustbpe.Tokenizer(), trained(texts_of(seed=5, count=100), 700)):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert again.get_mergeable_ranks() == tokenizer.get_mergeable_ranks()
        assert again.get_pattern() == tokenizer.get_pattern()


def test_training_from_files_equals_training_from_their_texts(tmp_path: Path) -> None:
    texts = texts_of(seed=4, count=60)
    paths = [tmp_path / f"{number}.txt" for number in range(60)]
    for path, text in zip(paths, texts, strict=True):
        path.write_bytes(text.encode())
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_files(paths, 900)
    assert tokenizer.get_mergeable_ranks() == trained(texts, 900).get_mergeable_ranks()
    paths[7].write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"7\.txt is not UTF-8: byte 2"):
        tokenizer.train_from_files(paths, 900)
    with pytest.raises(FileNotFoundError, match=r"no\.txt"):
        tokenizer.train_from_files([tmp_path / "no.txt"], 900)
    paths[7].write_text("a!")
    with pytest.raises(ValueError, match=r"\.txt: pattern does not cover"):
        tokenizer.train_from_files(paths, 900, pattern=r"\w+")


def test_progress_is_reported_and_may_stop_training() -> None:
    told: list[tuple[str, int]] = []
    texts = texts_of(seed=4, count=300)
    rustbpe.Tokenizer().train_from_iterator(texts, 700, progress=lambda *now: told.append(now))
    assert told[0] == ("read", 300) and told[-1] == ("merge", 700 - 256)

    def stop(stage: str, done: int) -> None:
        raise RuntimeError(f"enough of {stage}")

    with pytest.raises(RuntimeError, match="enough of read"):
        rustbpe.Tokenizer().train_from_iterator(texts, 700, progress=stop)


# --- processes that use it -----------------------------------------------------------------------


def run(code: str, *arguments: str, **options: Any) -> str:
    command = [sys.executable, *arguments, code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_a_signal_stops_training_while_texts_are_read() -> None:
    # itertools.repeat runs no Python code, so the interpreter itself never checks for signals.
    code = """
import itertools, signal, rustbpe
class Stop(Exception): pass
def stop(*_): raise Stop
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    rustbpe.Tokenizer().train_from_iterator(itertools.repeat("some text"), 300)
except Stop:
    print("stopped")
"""
    assert run(code, "-c") == "stopped"


def test_a_forked_process_can_encode() -> None:
    code = """
import os, rustbpe
tokenizer = rustbpe.Tokenizer()
tokenizer.train_from_iterator(["abab"], 300)
expected = tokenizer.batch_encode(["abab"] * 9)
child = os.fork()
if child == 0:
    os._exit(0 if tokenizer.batch_encode(["abab"] * 9) == expected else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code, "-c") == "0"


def test_the_installed_module_wins_over_the_source_folder() -> None:
    assert not (ROOT / "rustbpe" / "__init__.py").exists()
    assert Path(run("import rustbpe; print(rustbpe.__file__)", "-c")).parent.parent != ROOT
    # With `python -m`, the current folder, which contains rustbpe/, comes before the installed packages.
    assert "loop" in run("import rustbpe; rustbpe.Tokenizer()", "-m", "timeit", "-n1", "-r1", "-s")
