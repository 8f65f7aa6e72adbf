"""The book is whole by itself: any appendix may be torn out of a copy of the tree."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.repository.test_docs import ROOT
from tests.support.forks import forks

# Each appendix: its folders and files below nanochat/, and what stays of them.
APPENDICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cpu": (("platforms/cpu",), ()),
    "nvidia": (("platforms/nvidia",), ()),
    "ascend": (("platforms/ascend",), ()),
    "apple": (("platforms/apple",), ()),
    "models": (("models", "platforms/qwen_layers.py", "checkpoint_manager/huggingface"), ()),
    "serve": (("serve",), ("serve/__init__.py", "serve/cli", "serve/formats", "serve/chosen.py")),
    "rl": (("rl",), ()),
    "planner": (("planner",), ()),
    "evals": (("evals",), ("evals/__init__.py", "evals/loss.py")),
    "report": (("report",), ()),
    "export": (("export",), ()),
    "tinyworld": (("data/tinyworld", "../tasks/tinyworld.py"), ()),
    "schemas": (("generate/schema",), ()),
    "profile": (("runtime/profiling.py", "runtime/timeline.py"), ()),
    "cleaning": (("prepare/clean.py", "prepare/minhash.py", "prepare/overlap.py"), ()),
    "upstream": (("checkpoint_manager/upstream.py",), ()),
    "devices": (
        ("platforms",),
        tuple(
            f"platforms/{name}.py"
            for name in (
                "__init__",
                "base",
                "child",
                "host",
                "layers",
                "operations",
                "plain",
                "together",
            )
        ),
    ),
    "trackers": (tuple(f"runtime/trackers/{name}.py" for name in ("wandb", "swanlab", "tensorboard")), ()),
}
STEPS = 6
TRAIN = [
    "scripts.base_train",
    "--data=tinyworld",
    "--depth=2",
    "--model_dim=64",
    "--head_dim=32",
    "--max_seq_len=64",
    "--total_batch_size=256",
    "--device_batch_size=4",
    f"--num_iterations={STEPS}",
    "--eval_every=0",
    "--kernels=plain",
    "--no_compile",
    "--other_code",
]
CHAT = ["scripts.chat_cli", "-p", "What is 2 + 3?", "-t", "0", "-m", "4"]


def copy_without(appendix: str, folder: Path) -> Path:
    """A copy of the tree's Python, without an appendix. What Python compiled is still valid in it."""
    tree = folder / "tree"
    for name in ("nanochat", "scripts", "tasks"):
        shutil.copytree(ROOT / name, tree / name)
    gone, stays = APPENDICES.get(appendix, ((), ()))
    kept = {tree / "nanochat" / name for name in stays}
    for name in gone:
        path = tree / "nanochat" / name
        assert path.exists()
        entries = path.iterdir() if kept and path.is_dir() else [path]
        for entry in entries:
            if entry in kept:
                continue
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    return tree


def run(tree: Path, base: Path, *commands: list[str]) -> None:
    """Run commands of a tree, which must succeed."""
    settings = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DTYPE": "float32",
                "NANOCHAT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}  # fmt: skip
    for words in commands:
        code, _, err = forks().run(words, tree, settings)
        assert code == 0, err[-3000:]


def losses(tree: Path, base: Path) -> list[float]:
    """Train a tiny model in a tree, and ask it a question."""
    run(tree, base, TRAIN, CHAT)
    metrics = base / "base_checkpoints" / "d2" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder with a corpus and a tokenizer."""
    base = tmp_path_factory.mktemp("base")
    tokenizer = ["scripts.tok_train", "--data=tinyworld", "--vocab_size=512", "--max_chars=1000000"]
    run(ROOT, base, ["nanochat.dataset", "--data=tinyworld"], tokenizer)
    return base


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """What the whole tree gives."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(corpus, folder / "base")
    of_whole = losses(copy_without("", folder), folder / "base")
    assert len(of_whole) >= STEPS
    return of_whole


@pytest.mark.slow
@pytest.mark.parametrize("appendix", APPENDICES)
def test_an_appendix_may_be_torn_out(appendix: str, corpus: Path, whole: list[float], tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "home")
    assert losses(copy_without(appendix, tmp_path), tmp_path / "home") == whole
