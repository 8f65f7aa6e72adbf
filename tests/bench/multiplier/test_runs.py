"""The runs of bench.multiplier: a finished run is kept, and its name has everything that decides it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bench.multiplier import runs as running
from bench.multiplier.runs import Entry, Run
from bench.train.worker import ROOT, Variant
from tests.bench.multiplier.test_multiplier import EAGER, UPSTREAM, Counting, plan_in
from tests.bench.train.test_train import fake_upstream


def test_a_finished_run_is_never_trained_again_and_a_changed_one_is(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "rows")
    run = Run("code", 2, Entry("ours", EAGER), plan)
    runs = Counting(tmp_path, None)
    first = runs(run)
    again = Counting(tmp_path, None)
    assert again(run) == first and again.asked == [] and again.trained == 0
    hot = replace(EAGER, flags=("--matrix_lr=0.03",))
    others = [replace(run, plan=replace(plan, seed=2)), replace(run, plan=replace(plan, horizon=7)),
              replace(run, plan=replace(plan, held_out=5)), replace(run, entry=Entry("ours", hot)),
              replace(run, entry=Entry("ours", replace(EAGER, dtype="bfloat16")))]  # fmt: skip
    for other in others:
        again(other)
    assert again.asked == others and len(list(tmp_path.glob("code-d2-*.json"))) == 6
    again(replace(run, entry=Entry("other", EAGER)))  # the name alone changes nothing but the file's
    assert runs.path(run).name.startswith("code-d2-6-ours-seed1-")


def test_code_counts_and_comments_do_not(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Doc."""\ndef f(x):\n    """More."""\n    return x + 1  # why\n')
    one = running.code_of(tmp_path, ("a.py",))
    file.write_text("def f( x ):\n\n    return (x + 1)\n")
    assert running.code_of(tmp_path, ("a.py",)) == one
    file.write_text("def f(x):\n    return x + 2\n")
    assert running.code_of(tmp_path, ("a.py",)) != one
    (tmp_path / "a.cpp").write_text("int f() { return 1; }  // one\n")
    compiled = running.code_of(tmp_path, ("a.cpp",))
    (tmp_path / "a.cpp").write_text("// f\nint f() {\n    return 1;\n}\n")
    assert running.code_of(tmp_path, ("a.cpp",)) == compiled
    (tmp_path / "a.cpp").write_text("int f() { return 2; }\n")
    assert running.code_of(tmp_path, ("a.cpp",)) != compiled


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with the code of this repository that decides a run."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("nanochat", "scripts", "bench/train"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "web"))
    return folder


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("bench/train/side.py", True),
        ("scripts/base_train.py", True),
        ("nanochat/gpt.py", True),
        ("nanochat/nn/blocked_attention.py", True),
        ("nanochat/nn/few_launches.py", True),
        ("nanochat/nn/plain_attention.py", True),
        ("nanochat/nn/together.py", True),
        ("nanochat/train/flags.py", True),
        ("nanochat/train/fit/memory.py", True),
        ("nanochat/train/sizes.py", True),
        ("nanochat/platforms/host.py", True),
        ("nanochat/platforms/cpu/platform.py", True),
        ("nanochat/platforms/cpu/cpp/products.h", True),
        ("nanochat/rl/policy.py", False),
        ("scripts/chat_eval.py", False),
    ],
)
def test_code_that_decides_a_run_is_among_its_settings(file: str, counts: bool, copy: Path, tmp_path: Path) -> None:
    run = Run("code", 2, Entry("ours", replace(EAGER, checkout=copy)), plan_in(tmp_path / "rows"))
    before, source = running.settings(run, None), (copy / file).read_text(encoding="utf-8")
    (copy / file).write_text(source + "\nint X = 1;\n" if file.endswith(".h") else source + "\nX = 1\n")
    assert (running.settings(run, None) != before) == counts
    (copy / file).write_text(source + ("\n// why\n" if file.endswith(".h") else "\n# why\n"))
    assert running.settings(run, None) == before
    (copy / file).write_text(source)


def test_the_number_format_of_products_is_among_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in(tmp_path / "rows")

    def differ(variant: Variant, name: str, *values: str) -> bool:
        found = []
        for value in values:
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                found.append(running.settings(Run("code", 2, Entry("x", variant), plan), peer))
        return found[0] != found[1]

    half, peer = replace(EAGER, dtype="bfloat16"), fake_upstream(tmp_path / "upstream")
    assert differ(half, "NANOCHAT_INT8", "0", "1") and not differ(EAGER, "NANOCHAT_INT8", "0", "1")
    assert differ(EAGER, "NANOCHAT_KERNELS", "auto", "plain")
    for name, values in (("NANOCHAT_INT8", ("0", "1")), ("NANOCHAT_KERNELS", ("auto", "plain"))):
        assert not differ(replace(half, side="upstream"), name, *values)


def test_upstreams_runs_depend_on_what_upstream_reads(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, plan = fake_upstream(tmp_path / "upstream"), plan_in(tmp_path / "rows")
    runs = [Run("code", 2, entry, plan) for entry in (UPSTREAM, Entry("ours", EAGER))]
    first = [running.settings(run, peer) for run in runs]
    assert set(first[0]["shape"]) == set(first[1]["shape"]) - {"bigram_rows", "offset_layers"}
    with monkeypatch.context() as patch:
        changed = tmp_path / "changed"
        shutil.copytree(copy, changed)
        with (changed / "nanochat" / "gpt.py").open("a") as file:
            file.write("X = 1\n")
        patch.setattr(running, "ROOT", changed)
        assert [running.settings(run, peer) == before for run, before in zip(runs, first, strict=True)] == [True, False]
    with monkeypatch.context() as patch:
        patch.setattr("torch.__version__", "9.9")
        assert [running.settings(run, peer) == before for run, before in zip(runs, first, strict=True)] == [False] * 2
    (peer / "nanochat" / "common.py").write_text("X = 1\n")  # which gpt.py may import
    assert [running.settings(run, peer) == before for run, before in zip(runs, first, strict=True)] == [False, True]
