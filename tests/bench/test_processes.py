"""The processes of benchmarks: whose code they run, how they fail, what is refused."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import processes, tables
from bench.text import make_rows, standard_library
from bench.train.variants import Variant, training
from nanochat.common import UserError
from nanochat.tokenizer import Tokenizer
from tests.bench.fakes import TEXT, fake_upstream, tiny_plan
from tests.support.fake_engine import eventually


@pytest.mark.slow
def test_a_side_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    broken = fake_upstream(tmp_path / "broken", "raise SystemExit('no such model')")
    plan = tiny_plan(tmp_path / "rows")
    message = r"(?s)upstream eager float32 ended with code 1.*no such model"
    with (
        pytest.raises(UserError, match=message),
        training(Variant("upstream", "float32"), plan, broken) as process,
    ):
        process.answer()


SIDE = "from bench import child; import os, time; child.answers()(os.getpid()); time.sleep(100)"


def test_a_side_ends_with_the_benchmark_that_was_killed() -> None:
    benchmark = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SIDE!r}])"
    with subprocess.Popen([sys.executable, "-c", benchmark], stdout=subprocess.PIPE, cwd=processes.ROOT) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_a_side_has_one_thread_and_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    variables = processes.environment(Path("/checkout"), NANOCHAT_DTYPE="float32")
    assert "WORLD_SIZE" not in variables
    assert variables["OMP_NUM_THREADS"] == "1"
    assert variables["PYTHONPATH"].startswith("/checkout")
    assert variables["NANOCHAT_DTYPE"] == "float32"


def test_rows_are_the_text_cut_and_shuffled_and_the_same_every_time(tmp_path: Path) -> None:
    about = make_rows(tmp_path / "a", 300, 16, TEXT)
    assert about == make_rows(tmp_path / "b", 300, 16, TEXT)
    rows = np.load(tmp_path / "a" / "rows.npy")
    tokenizer = Tokenizer.train(TEXT.documents, 300)
    stream: list[int] = []
    for document in TEXT.documents:
        stream += [tokenizer.bos, *tokenizer.encode(document)]
    in_order = [tuple(stream[i : i + 17]) for i in range(0, len(stream) - 16, 17)]
    assert {tuple(row) for row in rows.tolist()} == set(in_order)
    assert tuple(rows[0].tolist()) != in_order[0]
    assert rows.dtype == np.uint16
    with pytest.raises(UserError, match="100,001"):
        make_rows(tmp_path / "c", 300, 100_000, TEXT)


@pytest.mark.slow
def test_the_standard_library_is_python_and_nothing_installed() -> None:
    text = standard_library(200_000)
    assert 200_000 <= sum(map(len, text.documents)) < 1_000_000
    assert text == standard_library(200_000)


def test_the_last_line_is_json_and_no_cell_is_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    tables.show(("side", "figure"), [("a long name " * 8, 1.5)])
    tables.finish("x", {"a": {"b": [1 / 3]}})
    lines = capsys.readouterr().out.splitlines()
    assert "a long name " * 7 in "".join(lines)
    assert lines[-1] == '{"benchmark": "x", "a": {"b": [0.333333]}}'
