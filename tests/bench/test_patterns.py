"""The comparison of split patterns: its text, that every byte counts, its figures by hand, and a quick run."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import regex
import torch

from bench import corpus, patterns
from bench.patterns import PATTERNS, Config, Run
from nanochat.common import UserError
from nanochat.evals.loss import Loss
from nanochat.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
EVERYTHING = "It's DON'T CamelCase iPhone 12345, 今天，天气很好！\r\n\n  \u3000x\t é e\u0301 ½ 😀 //a/b\n ǅa ʰ\u0300"


def make_texts(folder: Path, documents: int = 300) -> Path:
    """Write both files of a corpus, with sentences of a few words or a few Han letters."""
    some = random.Random(0)
    folder.mkdir()
    english = [f"w{chr(97 + i % 26) * (i % 7 + 1)}" for i in range(60)]
    chinese = [chr(0x4E00 + i) + chr(0x4E30 + i % 9) for i in range(60)]
    for kind, words, space in (("english", english, " "), ("chinese", chinese, "")):
        texts = [space.join(some.choices(words, k=150)) + "." for _ in range(documents)]
        (folder / f"{kind}.txt").write_text(corpus.SEPARATOR.join(texts), newline="")
    return folder


def test_text_is_drawn_once_in_its_language(tmp_path: Path) -> None:
    prose = [f"{number} green bottles are hanging on the wall" for number in range(50)]
    others = ["ça a été créé à l'été"] * 50
    (tmp_path / "english.txt").write_text(corpus.SEPARATOR.join([*prose, *others, *prose]), newline="")
    held_out, more = corpus.draw(tmp_path, "english", (0.0005, 0.0012))
    assert {*held_out, *more} <= {*prose} and not {*held_out} & {*more}
    for part, wanted in ((held_out, 500), (more, 1200)):  # as many documents as needed, and not one more
        assert sum(map(len, part[:-1])) < wanted <= sum(map(len, part))
    with pytest.raises(UserError, match=r"holds less than 0\.01 MB of English"):
        corpus.draw(tmp_path, "english", (0.01,))
    with pytest.raises(UserError, match=r"chinese\.txt, got .* made by: python -m bench\.corpus DIR"):
        corpus.draw(tmp_path, "chinese", (0.01,))


@pytest.mark.parametrize("name", PATTERNS)
def test_every_pattern_matches_every_character(name: str) -> None:
    assert "".join(regex.findall(PATTERNS[name], EVERYTHING)) == EVERYTHING


def test_o200k_begins_a_word_at_a_capital() -> None:
    assert regex.findall(PATTERNS["o200k"], "It's CamelCase，今天") == ["It's", " Camel", "Case", "，今天"]
    assert regex.findall(PATTERNS["nanochat"], "It's CamelCase，今天") == ["It", "'s", " CamelCase", "，今天"]


@pytest.mark.parametrize("length", [4, 7, 64])
def test_rows_hold_every_byte_of_the_text_and_nothing_else(length: int) -> None:
    tokenizer = Tokenizer.train(["abc abc 今天 abc"] * 9, 270)
    texts = ["abc 今天 " * 20, "x", "今天abc" * 9]
    rows = [batch for step in patterns.batches(texts, tokenizer, length) for batch in step.micro_batches]
    targets = torch.cat([batch[1].flatten() for batch in rows])
    assert tokenizer.decode(targets[targets >= 0].tolist()) == "".join(texts)
    for inputs, wanted in rows:
        assert (inputs[:, 0] == tokenizer.bos).all()
        known = wanted[:, :-1] >= 0
        assert (inputs[:, 1:][known & (wanted[:, 1:] >= 0)] == wanted[:, :-1][known & (wanted[:, 1:] >= 0)]).all()


def test_the_figures_by_hand() -> None:
    def model(pattern: str, seed: int, english: float, chinese: float) -> Run:
        losses = {"english": Loss(english, 0.0, 100, 400), "chinese": Loss(chinese, 0.0, 100, 300)}
        return Run(pattern, seed, 10, 5.0, losses)

    found = [model("a", 1, 1.0, 2.0), model("b", 1, 0.9, 2.2), model("a", 2, 1.2, 2.0), model("b", 2, 0.9, 2.4)]
    a, b = (patterns.summary(found, "a")[name] for name in "ab")
    assert b["bytes_per_token"] == {"english": 4.0, "chinese": 3.0}
    assert b["bits_per_byte"] == pytest.approx({"english": 0.9, "chinese": 2.3, "both": 1.6})
    assert b["difference"] == pytest.approx({"english": -0.2, "chinese": 0.3, "both": 0.05})
    # Variances .02 and 0; 0 and .02; .005 and .005, each of two.
    assert b["error"] == pytest.approx({"english": 0.1, "chinese": 0.1, "both": 0.005**0.5})
    assert a["difference"] == pytest.approx({"english": 0, "chinese": 0, "both": 0})
    assert patterns.summary(found[:2], "a")["b"]["error"] == {"english": None, "chinese": None, "both": None}
    assert any("2.3000 +0.3000 +-0.1000" in line for line in patterns.table({"a": a, "b": b}))


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--patterns must be among nanochat, han.*got 'gpt9'"):
        patterns.main(Config(tmp_path, patterns=("nanochat", "gpt9")))
    with pytest.raises(UserError, match="need at least one value"):
        patterns.main(Config(tmp_path, seeds=()))
    with pytest.raises(UserError, match=r"gives at most .* tokens, got --vocab_size 9,000"):
        patterns.main(Config(make_texts(tmp_path / "text"), vocab_size=9000, text_mb=0.05, held_out_mb=0.01))


@pytest.mark.smoke
def test_a_quick_comparison_ends_and_resumes(base_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.patterns", "--quick", "--corpus", str(make_texts(tmp_path / "text")),
               "--patterns", "nanochat", "han4", "--vocab_size", "400", "--text_mb", ".06", "--held_out_mb", ".01",
               "--train_mb", ".02", "--seeds", "1"]  # fmt: skip

    def compare(*more: str) -> tuple[dict[str, Any], dict[Path, int]]:
        done = subprocess.run([*command, *more], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        models = {path: path.stat().st_mtime_ns for path in base_folder.rglob("model.safetensors")}
        return json.loads(done.stdout.splitlines()[-1]), models

    result, models = compare()
    nanochat, han4 = result["runs"]
    assert [(model["pattern"], model["seed"]) for model in result["runs"]] == [("nanochat", 1), ("han4", 1)]
    sizes = [{language: loss["bytes"] for language, loss in model["losses"].items()} for model in result["runs"]]
    assert sizes[0] == sizes[1], "all patterns are measured on the same text"
    assert nanochat["losses"]["chinese"]["tokens"] != han4["losses"]["chinese"]["tokens"]
    assert 0 < result["patterns"]["han4"]["bits_per_byte"]["both"] < 8
    assert not (base_folder / "tokenizer").exists(), "the user's own tokenizers are left alone"

    again, more = compare("--equal", "flops")
    assert again["runs"][0] == nanochat and again["runs"][1]["steps"] == nanochat["steps"] != han4["steps"]
    assert models.items() <= more.items(), "a model that exists is not trained again"
