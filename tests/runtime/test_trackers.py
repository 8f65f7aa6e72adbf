"""Trackers beside training: the real packages offline, and a wandb that fails, hangs or dies when it is told to."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.runtime import tracking
from nanochat.runtime.trackers import beside
from nanochat.runtime.trackers.beside import Beside
from nanochat.runtime.trackers.start import Start, numbers
from nanochat.runtime.tracking import Tracker, parse_trackers, read_metrics

SETTINGS = {"depth": 4, "data": None, "matrix_lr": 0.02}
LINES = [
    {"step": 1, "loss": 2.5, "skipped": False, "grad_norm": float("inf")},
    {"step": 2, "loss": 1.25, "skipped": True, "grad_norm": 3.0, "val_bpb": 0.75},
]
SEEN = {1: {"loss": 2.5, "skipped": 0.0}, 2: {"loss": 1.25, "skipped": 1.0, "grad_norm": 3.0, "val_bpb": 0.75}}


def track(folder: Path, trackers: str, run: str = "dummy", step: int = 0) -> None:
    tracker = Tracker(folder, run, SETTINGS, step, True, trackers, "base-d4")
    for line in LINES:
        tracker.log(**{**line, "step": line["step"] + step})
    tracker.close()


# --- the real packages ---------------------------------------------------------------------------


def tensorboard_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def test_tensorboard_reads_back_every_number_and_the_settings(tmp_path: Path) -> None:
    track(tmp_path, "tensorboard")
    events = tensorboard_events(tmp_path)
    found: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            found.setdefault(event.step, {})[name] = event.value
    assert found == SEEN
    (text,) = events.Tensors("settings/text_summary")
    assert b"depth: 4" in text.tensor_proto.string_val[0] and b"data: null" in text.tensor_proto.string_val[0]


def test_tensorboard_hides_what_an_interrupted_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    track(tmp_path, "tensorboard")
    time.sleep(1.1)  # the names of event files hold whole seconds, and TensorBoard reads them in that order
    track(tmp_path, "tensorboard", step=1)
    losses = tensorboard_events(tmp_path).Scalars("loss")
    assert [(event.step, event.value) for event in losses] == [(1, 2.5), (2, 2.5), (3, 1.25)]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


@pytest.mark.slow
def test_swanlab_without_a_key_keeps_the_run_in_files_of_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SWANLAB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    track(tmp_path, "swanlab")
    (run,) = (tmp_path / "swanlab").glob("run-*")
    config = (run / "files" / "config.yaml").read_text()
    assert "depth" in config and "matrix_lr" in config
    content = b"".join(path.read_bytes() for path in run.glob("run-*.swanlab"))
    assert all(name.encode() in content for name in ("loss", "skipped", "grad_norm", "val_bpb"))
    assert "swanlab failed" not in capfd.readouterr().err


@pytest.mark.slow
def test_wandb_offline_keeps_the_run_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    track(tmp_path, "wandb:offline")
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    content = b"".join(path.read_bytes() for path in run.glob("run-*.wandb"))
    assert all(name.encode() in content for name in ("loss", "val_bpb", "matrix_lr", "base-d4"))
    assert "wandb failed" not in capfd.readouterr().err


def test_wandb_without_a_key_is_named_and_the_figures_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    track(tmp_path, "wandb")
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert capsys.readouterr().err.count("wandb failed and is off for the rest of this run: No API key") == 1


# --- a wandb that does what it is told -----------------------------------------------------------

FAKE = """
import json, os, signal, time
told, seen = json.loads(os.environ["FAKE_WANDB"]), os.environ["FAKE_WANDB_SEEN"]

def note(**what):
    with open(seen, "a") as f:
        f.write(json.dumps(what) + "\\n")

def do(when):
    what = told.get(when)
    if what == "fail":
        raise ConnectionError("no network")
    if what == "hang":
        time.sleep(1000)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)

class Run:
    def log(self, figures, step):
        do(f"log {step}")
        assert step == figures["step"]
        note(**figures)
    def finish(self):
        do("finish")
        note(finished=True)

def init(**given):
    print("a library that prints")
    do("init")
    note(**given)
    return Run()
"""


class Fake:
    """Puts a package wandb before the real one for the processes of trackers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        (folder / "fake" / "wandb").mkdir(parents=True)
        (folder / "fake" / "wandb" / "__init__.py").write_text(FAKE)
        monkeypatch.setenv("PYTHONPATH", str(folder / "fake"))
        monkeypatch.setenv("FAKE_WANDB_SEEN", str(folder / "seen"))
        self._file, self._patch = folder / "seen", monkeypatch
        self.told()

    def told(self, **when: str) -> None:
        self._patch.setenv("FAKE_WANDB", json.dumps({name.replace("_", " "): what for name, what in when.items()}))

    @property
    def seen(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._file.read_text().splitlines()] if self._file.exists() else []


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def test_a_named_run_gets_the_same_figures(tmp_path: Path, fake: Fake) -> None:
    track(tmp_path, "jsonl", run="my-run")
    begin, *lines, end = fake.seen
    assert begin == {"project": "nanochat", "name": "my-run", "config": SETTINGS, "mode": None}
    assert lines == LINES  # what is not finite too
    assert end == {"finished": True}
    track(tmp_path, "wandb:offline")
    begin = fake.seen[-4]
    assert (begin["name"], begin["mode"]) == ("base-d4", "offline")  # of stage and model


@pytest.mark.parametrize(
    ("when", "what", "why"),
    [
        ("init", "fail", "no network"),
        ("init", "hang", "it did not"),
        ("log_2", "die", "its process ended early, with code -9"),
        ("log_2", "hang", "it did not finish within 1 s"),
        ("finish", "fail", "no network"),
    ],
)
def test_a_tracker_that_breaks_is_named_once_and_the_figures_are_kept(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], when: str,
    what: str, why: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(Beside.close, "__defaults__", (5.0 if what != "hang" else 1.0,))
    fake.told(**{when: what})
    tracker = Tracker(tmp_path, "dummy", SETTINGS, 0, True, "wandb", "base-d4")
    for line in LINES:
        tracker.log(**line)
    tracker.close()
    tracker.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    said = capsys.readouterr().err
    assert said.count("wandb failed and is off for the rest of this run") == 1 and why in said


def test_a_tracker_that_never_starts_is_given_up_while_training_goes_on(
    tmp_path: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.told(init="hang")
    tracker = Beside("wandb", Start("x", tmp_path, {}, 0), start_seconds=0.0)
    tracker.log({"step": 1})
    assert "wandb failed" in capsys.readouterr().err and "did not start within 0 s" in tracker.failure
    tracker.close()


def test_lines_that_a_tracker_cannot_take_in_time_do_not_fill_the_memory(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "MOST_WAITING", 3)
    fake.told(init="hang")
    tracker = Beside("wandb", Start("x", tmp_path, {}, 0))
    for step in range(20):
        tracker.log({"step": step, "text": "x" * 100_000})
    assert "does not keep up: 3 lines wait" in tracker.failure
    tracker.close()


@pytest.mark.parametrize("what", ["fail", "hang"])
def test_a_wandb_that_cannot_start_is_refused_before_training(
    tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    fake.told(init=what)
    monkeypatch.setattr(beside.Beside.__init__, "__defaults__", (1.0 if what == "hang" else 60.0,))
    with pytest.raises(UserError, match=r"wandb could not start run 'my-run': .*wandb login"):
        Tracker(tmp_path, "my-run", {}, 0, main=True)


# --- the list ------------------------------------------------------------------------------------


def test_a_list_of_trackers_is_read_with_its_modes() -> None:
    assert parse_trackers("jsonl") == {"jsonl": ""}
    assert parse_trackers("swanlab:local, wandb:offline,tensorboard") == {
        "swanlab": "local", "wandb": "offline", "tensorboard": ""
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("comet", "takes jsonl, wandb, swanlab, tensorboard"),
        ("", "takes jsonl"),
        ("wandb,wandb", "at most once"),
        ("wandb:local", "wandb has the modes online, offline, got 'local'"),
        ("tensorboard:offline", "tensorboard has no mode, got 'offline'"),
    ],
)
def test_a_wrong_list_is_refused_with_the_right_words(given: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        parse_trackers(given)
    assert refused.value.exit_code == 2


def test_a_library_that_is_not_installed_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs the package swanlab.*pip install swanlab"):
        parse_trackers("jsonl,swanlab")
    with pytest.raises(UserError, match="--run my-run needs wandb"):
        Tracker(tmp_path, "my-run", {}, 0, main=True)
    assert parse_trackers("jsonl") == {"jsonl": ""}


def test_only_finite_numbers_are_shown() -> None:
    figures = {"step": 3, "loss": 1, "bad": float("nan"), "note": "x", "list": [1], "none": None, "skipped": True}
    assert numbers(figures) == {"loss": 1.0, "skipped": 1.0}
