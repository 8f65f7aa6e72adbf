"""Passages of evaluations are found in documents as a slow search for them finds them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.prepare.overlap import CHARACTERS, WORDS, Passages, passages, read_passages

QUESTION = "A train leaves at nine and travels for three hours at sixty miles an hour, so how far does it go?"
HAN = "".join(chr(0x4E00 + 11 * i) for i in range(90))


def write(folder: Path, name: str, *rows: dict[str, object]) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return folder


def named(found: Passages, text: str) -> set[str]:
    return {found.names[number] for number in found.sets_in(text)}


def test_documents_with_a_passage_name_the_set_that_has_it(tmp_path: Path) -> None:
    write(tmp_path, "gsm8k/main/test.jsonl", {"question": QUESTION, "answer": "180"})
    write(tmp_path, "ceval-exam/val/law.jsonl", {"question": HAN, "A": "一"})
    write(tmp_path, "empty/test.jsonl", {"question": "too short"})
    found = read_passages(tmp_path)
    assert found.names == ("ceval-exam", "gsm8k")
    assert named(found, f"Some page says:\n\n{QUESTION.upper().replace(' ', '  ')} Nobody knows.") == {"gsm8k"}
    assert named(found, f"网页：{HAN[20:75]}。") == {"ceval-exam"}
    assert named(found, f"{QUESTION} {HAN}") == {"gsm8k", "ceval-exam"}
    assert named(found, "Nothing of that. 没有。") == set()


def test_one_word_or_character_less_is_no_passage(tmp_path: Path) -> None:
    words = QUESTION.split()
    write(tmp_path, "a/test.jsonl", {"q": QUESTION, "zh": HAN})
    found = read_passages(tmp_path)
    for start in range(3):
        assert named(found, " ".join(words[start : start + WORDS])) == {"a"}
        assert named(found, " ".join(words[start : start + WORDS - 1])) == set()
        assert named(found, HAN[start : start + CHARACTERS]) == {"a"}
        assert named(found, HAN[start : start + CHARACTERS - 1]) == set()


def slow_characters(text: str) -> set[str]:
    """Windows of CHARACTERS letters and digits of which at least half are Han."""
    kept = [
        c
        for c in text.lower()
        if "\u4e00" <= c <= "\u9fff" or "\u3400" <= c <= "\u4dbf" or c in "0123456789abcdefghijklmnopqrstuvwxyz"
    ]
    found = ("".join(kept[i : i + CHARACTERS]) for i in range(len(kept) - CHARACTERS + 1))
    return {w for w in found if 2 * sum(c >= "\u3400" for c in w) >= CHARACTERS}


def slow_words(text: str) -> set[tuple[str, ...]]:
    words = "".join(c.lower() if not c.isascii() or c.isalnum() else " " for c in text).split()
    return {tuple(words[i : i + WORDS]) for i in range(len(words) - WORDS + 1)}


@pytest.mark.parametrize("seed", range(6))
def test_two_texts_share_hashes_exactly_where_they_share_passages(seed: int) -> None:
    rng = np.random.default_rng(seed)
    units = [*"abcde", *"教育中文的", " ", ", ", "3"]
    one, other = ("".join(rng.choice(units, 400)) for _ in range(2))
    other = other[:200] + one[100:320] + other[200:]
    for text in (one, other):
        assert len(np.unique(passages(text))) == len(slow_words(text)) + len(slow_characters(text))
    shared = len(slow_words(one) & slow_words(other)) + len(slow_characters(one) & slow_characters(other))
    assert len(np.intersect1d(passages(one), passages(other))) == shared > 0


def test_files_of_every_kind_are_read_and_files_for_training_are_not(tmp_path: Path) -> None:
    texts = [f"{n} {QUESTION}" for n in ("first", "second", "third", "fourth", "fifth")]
    (tmp_path / "s" / "data").mkdir(parents=True)
    pq.write_table(
        pa.table({"q": [texts[0]], "choices": [["x", texts[1]]]}), tmp_path / "s" / "data" / "test-0.parquet"
    )
    (tmp_path / "s" / "dev.csv").write_text(f'id,question\n1,"{texts[2]}"\n')
    (tmp_path / "s" / "val.json").write_text(json.dumps([{"a": {"b": texts[3]}}]))
    write(tmp_path, "s/train.jsonl", {"q": f"only here {texts[4]} and nowhere else in the world, says the last of us"})
    lines = [json.dumps({"q": text}) for text in ("short", f"of a line {texts[4]}")]
    (tmp_path / "s" / "test.json").write_text("\n".join(lines))  # as in CLUE
    found = read_passages(tmp_path)
    for text in [*texts[:4], f"of a line {texts[4]}"]:
        assert named(found, text) == {"s"}
    assert named(found, "here and nowhere else in the world says the last of us who were here") == set()


@pytest.mark.parametrize("name", ["test.jsonl", "test.json", "test.csv", "test.tsv"])
def test_what_is_rare_in_intact_files_is_read(tmp_path: Path, name: str) -> None:
    """A byte order mark, line separators that are part of a text, half a surrogate pair, and very long fields."""
    text = f"one\u2028two {'long ' * 40_000} {QUESTION}"
    if name.startswith("test.j"):
        body = json.dumps({"q": text, "half": "a\ud800 教" * 20}, ensure_ascii=False).replace("\ud800", "\\ud800")
    else:
        body = f'id{"," if name == "test.csv" else chr(9)}"{text}"\n'
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / name).write_text(body, encoding="utf-8-sig")
    assert named(read_passages(tmp_path), f"here {QUESTION}") == {"s"}


def test_evaluations_in_which_nothing_is_found_are_listed(tmp_path: Path) -> None:
    sets = tmp_path / "sets"
    for name in ("cmmlu/cmmlu_v1_0_1.zip", "humaneval/HumanEval.jsonl.gz", ".cache/a.txt"):
        (sets / name).parent.mkdir(parents=True)
        (sets / name).write_bytes(b"")
    write(sets, "a/test.jsonl", {"q": QUESTION})
    found = read_passages(sets)
    assert found.names == ("a",) and found.without == ("cmmlu", "humaneval")


def test_a_folder_without_evaluations_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="--check_against names a folder") as raised:
            read_passages(folder)
        assert raised.value.exit_code == 2
    write(tmp_path, "a/test.jsonl", {"q": QUESTION})
    (tmp_path / "a" / "test.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UserError, match=r"test\.parquet cannot be read"):
        read_passages(tmp_path)
