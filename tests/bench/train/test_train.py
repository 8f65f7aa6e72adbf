"""The training benchmark: its rows, its arithmetic, and its processes at tiny sizes beside a made-up upstream."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.train import __main__ as bench
from bench.train.__main__ import Config, Measured, Plan, Variant
from bench.train.rows import Text, check_rows, make_rows, standard_library
from nanochat.common import UserError
from nanochat.gpt import GPTConfig
from nanochat.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent.parent
TINY = GPTConfig(sequence_len=16, vocab_size=300, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="L")
TEXT = Text(
    [f"the cat number {i} sat on the mat of cat number {i + 1} and saw {i * i} dogs" for i in range(60)], "cats"
)

# The part of upstream's API that bench.train uses, with a model of one table.
UPSTREAM = """
from dataclasses import dataclass
import os
import torch
import torch.nn.functional as F

@dataclass
class GPTConfig:
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    window_pattern: str

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        print("chatter that is no answer")
        self.table = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def init_weights(self):
        assert os.environ["NANOCHAT_DTYPE"] in ("float32", "bfloat16")
        torch.nn.init.zeros_(self.table.weight)

    def setup_optimizer(self, unembedding_lr, embedding_lr, matrix_lr, weight_decay, scalar_lr):
        print("asked:", unembedding_lr, embedding_lr, matrix_lr, round(weight_decay, 4), scalar_lr)
        return torch.optim.SGD(self.parameters(), lr=matrix_lr / 0.02, momentum=0.1)

    def forward(self, idx, targets, kv_cache=None, loss_reduction="mean"):
        logits = self.table(idx).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=loss_reduction)
"""


def fake_upstream(folder: Path, source: str = UPSTREAM) -> Path:
    (folder / "nanochat").mkdir(parents=True)
    (folder / "nanochat" / "__init__.py").touch()
    (folder / "nanochat" / "gpt.py").write_text(source)
    (folder / "nanochat" / "optim.py").touch()
    return folder


def tiny_plan(folder: Path) -> Plan:
    make_rows(folder, TINY.vocab_size, TINY.sequence_len, TEXT)
    return Plan(TINY, folder, rows_per_step=4, rounds=2, steps=2, warmup=1, held_out=4)


# --- rows ------------------------------------------------------------------------------------------


def test_rows_are_the_text_cut_and_shuffled_and_the_same_every_time(tmp_path: Path) -> None:
    about = make_rows(tmp_path / "a", 300, 16, TEXT)
    assert about == make_rows(tmp_path / "b", 300, 16, TEXT) == check_rows(tmp_path / "a", 300, 16)
    rows = np.load(tmp_path / "a" / "rows.npy")
    assert rows.shape == (about["rows"], 17) and rows.dtype == np.uint16
    tokenizer = Tokenizer.load(tmp_path / "a")
    stream = [token for document in TEXT.documents for token in (tokenizer.bos, *tokenizer.encode(document))]
    whole = {tuple(stream[i : i + 17]) for i in range(0, len(stream) - 16, 17)}
    assert {tuple(row) for row in rows.tolist()} == whole
    assert tuple(rows[0].tolist()) != tuple(stream[:17])


def test_rows_of_another_shape_or_damaged_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no rows in .*--make-rows"):
        check_rows(tmp_path, 300, 16)
    make_rows(tmp_path, 300, 16, TEXT)
    (tmp_path / "token_bytes.npy").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no rows in"):
        check_rows(tmp_path, 300, 16)
    (tmp_path / "elsewhere").rename(tmp_path / "token_bytes.npy")
    with pytest.raises(UserError, match="must have 33 tokens of a vocabulary of 300, got 17 of 300"):
        check_rows(tmp_path, 300, 32)
    data = bytearray((tmp_path / "rows.npy").read_bytes())
    data[-1] ^= 1
    (tmp_path / "rows.npy").write_bytes(data)
    with pytest.raises(UserError, match="checksum"):
        check_rows(tmp_path, 300, 16)


def test_a_text_of_less_than_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fewer than one row"):
        make_rows(tmp_path, 300, 100_000, TEXT)


def test_the_standard_library_is_python_and_nothing_installed() -> None:
    text = standard_library(200_000)
    assert 200_000 <= sum(map(len, text.documents)) < 1_000_000
    assert "standard library of Python 3" in text.about
    assert any('"""' in document for document in text.documents)
    assert text == standard_library(200_000)


# --- arithmetic ------------------------------------------------------------------------------------


def test_flops_of_the_d4_configuration() -> None:
    assert bench.flops_per_token(bench.D4) == 31_457_280


def measured_by_hand() -> dict[Variant, Measured]:
    def one(seconds: list[float], peak: int, parameters: int = 10) -> Measured:
        return Measured(parameters, [5.0, 4.0], seconds, peak)

    return {
        Variant("matmuls", "bfloat16"): one([1.0, 2.0, 9.0], 0, parameters=1_000),
        Variant("ours", "float32"): one([8.0], 900),
        Variant("ours", "bfloat16", True): replace(one([5.0, 4.0, 1.0], 600), compile_seconds=6.54),
        Variant("upstream", "float32"): one([10.0], 700),
        Variant("upstream", "bfloat16", True): one([6.0], 800),
    }


def test_figures_follow_from_medians_of_the_fastest_variants(tmp_path: Path) -> None:
    plan = Plan(TINY, tmp_path, rows_per_step=4, rounds=1, steps=3)
    tokens, matmul_flops = 64, 6 * 1_000 * 64 / 2.0
    flops = 6 * (12 * 2 * 32**2 + 300 * 32) + 12 * 2 * 32 * 16
    assert bench.figures(measured_by_hand(), plan) == {
        "benchmark": "train",
        "variant": "ours compiled bfloat16",
        "tokens_per_cpu_second": tokens / 4.0,
        "share_of_matmul_peak": pytest.approx(flops * tokens / (4.0 * matmul_flops), abs=1e-4),
        "matmul_gflops": round(matmul_flops / 1e9, 1),
        "eager_tokens_per_cpu_second": tokens / 8.0,
        "compile_cpu_seconds": 6.5,
        "vs_upstream_default": 2.5,
        "vs_upstream_best": 1.5,
    }
    text = bench.table(measured_by_hand(), plan).splitlines()
    assert len(text) == 1 + 5 and all(len(line) < 140 for line in text)


def test_figures_without_a_peer_say_nothing_of_one(tmp_path: Path) -> None:
    alone = {v: m for v, m in measured_by_hand().items() if v.side != "upstream"}
    keys = bench.figures(alone, Plan(TINY, tmp_path, 4, 1, 1)).keys()
    assert "tokens_per_cpu_second" in keys and not [key for key in keys if "upstream" in key]


# --- processes -------------------------------------------------------------------------------------


def test_both_sides_train_in_turns_on_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    plan = tiny_plan(tmp_path / "rows")
    variants = [Variant("matmuls", "bfloat16"), Variant("ours", "float32"), Variant("upstream", "float32")]
    measured = bench.measure(variants, plan, fake_upstream(tmp_path / "upstream"))
    for variant in variants:
        assert len(measured[variant].seconds) == plan.rounds * plan.steps
        assert len(measured[variant].losses) == plan.warmup + plan.rounds * plan.steps
        assert min(measured[variant].seconds) > 0
        assert measured[variant].peak_bytes > 10e6
    for side in variants[1:]:
        losses = measured[side].losses
        assert losses[0] == pytest.approx(np.log(300), abs=0.02) and losses[-1] < losses[0]
    assert measured[variants[0]].parameters == 12 * 2 * 32**2 + 300 * 32
    assert measured[variants[2]].parameters == 300**2
    assert json.loads(json.dumps(bench.figures(measured, plan)))["vs_upstream_default"] > 0


def test_a_side_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path / "rows")
    old = fake_upstream(tmp_path / "old", UPSTREAM.replace("def setup_optimizer", "def setup_optimizers"))
    with pytest.raises(UserError, match=r"(?s)upstream eager float32 ended with code 1.*no setup_optimizer"):
        bench.measure([Variant("upstream", "float32")], plan, old)


# --- command line ----------------------------------------------------------------------------------


def test_what_is_measured() -> None:
    def names(compiler_missing: str = "", default: str = "bfloat16", **flags: Any) -> list[str]:
        return [variant.name for variant in bench.variants(Config(**flags), compiler_missing, default)]

    own = ["matmuls eager bfloat16", "ours eager float32", "ours eager bfloat16"]
    assert names(quick=True) == ["matmuls eager bfloat16", "ours eager bfloat16", "ours compiled bfloat16"]
    own_fp32 = ["matmuls eager float32", "ours eager float32", "ours compiled float32"]
    assert names(quick=True, default="float32") == own_fp32
    assert names(upstream=Path("x"), default="float32") == [
        *own_fp32, "upstream eager float32", "upstream compiled float32",
    ]  # fmt: skip
    assert names("no g++", upstream=Path("x"), default="float32")[1:] == [own_fp32[1], "upstream eager float32"]
    assert names("no g++", quick=True) == ["matmuls eager bfloat16", "ours eager bfloat16"]
    assert names() == [*own, "ours compiled bfloat16"]
    assert names(upstream=Path("x")) == [
        *own, "ours compiled bfloat16", "upstream eager float32", "upstream compiled bfloat16",
    ]  # fmt: skip
    assert names("no g++", upstream=Path("x")) == [*own, "upstream eager float32", "upstream eager bfloat16"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"upstream": Path("nowhere")}, "got nowhere, which is no folder"),
        ({"upstream": Path()}, "which has no nanochat/gpt.py and no nanochat/optim.py"),
        ({"upstream": Path(), "quick": True}, "leave out --quick or --upstream"),
        ({"rounds": 0}, "at least 1, got 0"),
        ({"steps": -1}, "--steps must be at least 0, got -1"),
        ({"scales": (1.0, 0.0)}, r"numbers above 0, got \(1.0, 0.0\)"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as refusal:
        bench.main(Config(**flags))
    assert refusal.value.exit_code == 2


def test_a_wrong_command_line_ends_with_code_2(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "bench.train", "--upstream", "nowhere"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: --upstream must name a folder")
    assert list(here.iterdir()) == []


def test_the_last_line_tells_the_bytes_that_ranks_send(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {
        Variant("matmuls", "bfloat16"): Measured(10, [0.0], [1.0]),
        Variant("ours", "float32"): Measured(10, [2.0], [3.0], 100),
    }
    monkeypatch.setattr(bench, "measure", lambda *_: measured)
    monkeypatch.setattr(bench, "make_rows", lambda *_: {"rows": 1, "row_tokens": 513, "text": "none"})
    monkeypatch.setattr(bench, "wire_bytes_per_parameter", lambda: 4.8214)
    bench.main(Config(quick=True))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["wire_bytes_per_parameter"] == 4.821 and found["variant"] == "ours eager float32"
