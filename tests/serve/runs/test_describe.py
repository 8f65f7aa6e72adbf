"""The runs under a base folder are found and described: running, finished or stopped, and how far."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import write_json
from nanochat.runtime.trackers.jsonl import Jsonl, describe_run
from nanochat.serve.runs import describe
from nanochat.serve.runs.describe import TAIL_BYTES, Describer, Run, find_runs, tail


def lines(*steps: int, seconds: float = 2.0) -> str:
    return "".join(f'{{"step": {step}, "loss": {step / 10}, "seconds": {seconds}}}\n' for step in steps)


def write_run(base: Path, tag: str, text: str, place: str = "base", at: float = 1000.0, **about: Any) -> Run:
    folder = base / f"{place}_checkpoints" / tag
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text)
    os.utime(folder / "metrics.jsonl", (at, at))
    if about:
        write_json(folder / "run.json", about)
    return Run({"chatsft": "sft", "chatrl": "rl"}.get(place, place), folder)


def described(run: Run, now: float = 1001.0) -> dict[str, Any]:
    told = Describer().describe(run, now)
    assert told is not None
    return told


# --- which there are -----------------------------------------------------------------------------


def test_runs_of_all_stages_are_found_the_newest_first(tmp_path: Path) -> None:
    write_run(tmp_path, "d4", lines(1), at=10)
    write_run(tmp_path, "d4", lines(1), "chatsft", at=30)
    write_run(tmp_path, "d8", lines(1), "chatrl", at=20)
    (tmp_path / "base_checkpoints" / "empty").mkdir()
    runs, older = find_runs(tmp_path)
    assert [(run.stage, run.folder.name) for run in runs] == [("sft", "d4"), ("rl", "d8"), ("base", "d4")]
    assert older == 0 and len({run.key for run in runs}) == 3


def test_the_list_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "MOST_RUNS", 2)
    for number in range(5):
        write_run(tmp_path, f"d{number}", lines(1), at=number)
    runs, older = find_runs(tmp_path)
    assert ([run.folder.name for run in runs], older) == (["d4", "d3"], 3)


def test_no_base_folder_means_no_runs(tmp_path: Path) -> None:
    assert find_runs(tmp_path / "nothing") == ([], 0)


# --- how far they are ----------------------------------------------------------------------------


def test_the_tail_holds_the_last_value_of_each_figure_and_the_pace(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "val_bpb": 2.0, "seconds": 99}\n' + lines(*range(2, 30)) + '{"step": 30, "lo')
    end = tail(path)
    assert (end.step, end.figures["val_bpb"], end.figures["loss"], end.pace) == (29, 2.0, 2.9, 2.0)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "early": 1}\n' + lines(*range(2, 6000)))
    assert path.stat().st_size > TAIL_BYTES
    end = tail(path)
    assert end.step == 5999 and "early" not in end.figures


def test_a_file_without_lines_has_no_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    assert (tail(path).step, tail(path).figures, tail(path).pace) == (0, {}, None)


# --- their state ---------------------------------------------------------------------------------


def test_a_run_whose_file_is_open_runs_and_says_how_long_still(tmp_path: Path) -> None:
    folder = tmp_path / "base_checkpoints" / "d4"
    written = Jsonl(folder, 0)
    describe_run(folder, {"steps": 100, "device": "CPU", "ranks": 2, "parameters": 5_000_000})
    for step in range(1, 41):
        written.log({"step": step, "seconds": 0.5})
    run = Run("base", folder)
    told = described(run, now=1e12)  # however long the last line is ago
    assert (told["state"], told["step"], told["steps"], told["seconds_left"]) == ("running", 40, 100, 30.0)
    assert (told["device"], told["ranks"], told["parameters"]) == ("CPU", 2, 5_000_000)
    written.close()
    assert described(run)["state"] == "stopped"
    assert described(run)["seconds_left"] is None


def test_a_killed_training_has_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "base_checkpoints" / "d4"
    code = f"""import os, pathlib
from nanochat.runtime.trackers.jsonl import Jsonl, describe_run
folder = pathlib.Path({str(folder)!r})
jsonl = Jsonl(folder, 0)
describe_run(folder, {{"steps": 10}})
jsonl.log({{"step": 1}})
print("written", flush=True)
input()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout and process.stdin and process.stdout.readline() == b"written\n"
    assert described(Run("base", folder))["state"] == "running"
    process.kill()
    process.communicate()
    assert described(Run("base", folder))["state"] == "stopped"


def test_all_steps_done_means_finished(tmp_path: Path) -> None:
    assert described(write_run(tmp_path, "d4", lines(1, 2, 3), steps=3))["state"] == "finished"
    assert described(write_run(tmp_path, "d8", lines(1, 2), steps=3, host=socket.gethostname()))["state"] == "stopped"


@pytest.mark.parametrize(("after", "state"), [(10, "running"), (119, "running"), (121, "stopped")])
def test_a_run_of_another_host_runs_as_long_as_it_writes(tmp_path: Path, after: float, state: str) -> None:
    run = write_run(tmp_path, "d4", lines(1, 2), steps=3, host="another", at=1000.0)
    assert described(run, 1000.0 + after)["state"] == state


def test_slow_steps_are_waited_for(tmp_path: Path) -> None:
    run = write_run(tmp_path, "d4", lines(1, 2, seconds=60.0), steps=3, host="another", at=1000.0)
    assert described(run, 1000.0 + 1199)["state"] == "running"
    assert described(run, 1000.0 + 1201)["state"] == "stopped"


def test_what_changes_is_seen_and_what_does_not_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looker, reads = write_run(tmp_path, "d4", lines(1), steps=9), Describer(), []
    monkeypatch.setattr(describe, "tail", lambda path: reads.append(path) or tail(path))
    for _ in range(3):
        looker.describe(run, 1.0)
    assert len(reads) == 1
    with open(run.metrics, "a") as file:
        file.write(lines(2))
    told = looker.describe(run, 1.0)
    assert told and told["step"] == 2 and len(reads) == 2


# --- hostile folders -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "about", ["", "[" * 100_000, "[]", '{"steps": "many", "device": ["x"], "ranks": -1}', "\ud800"]
)
def test_a_damaged_description_leaves_the_figures(tmp_path: Path, about: str) -> None:
    run = write_run(tmp_path, "d4", lines(1, 2))
    (run.folder / "run.json").write_bytes(about.encode(errors="surrogatepass"))
    told = described(run)
    assert (told["step"], told["steps"]) == (2, None)
    assert not {"device", "ranks"} & told.keys()


def test_a_figure_beyond_all_measure_has_no_end(tmp_path: Path) -> None:
    folder = tmp_path / "base_checkpoints" / "d4"
    written = Jsonl(folder, 0)
    describe_run(folder, {"steps": 2**52})
    written.log({"step": 1, "seconds": 1e299})
    assert described(Run("base", folder))["seconds_left"] is None
    written.close()


@pytest.mark.parametrize("name", ["<img src=x onerror=alert(1)>", "..%2f..", "a\x1b[31mb", "\u202e4d", b"\xff\xfe"])
def test_any_name_of_a_folder_is_only_text(tmp_path: Path, name: str | bytes) -> None:
    text = os.fsdecode(name)
    told = described(write_run(tmp_path, text, lines(1)))
    assert told["id"].isalnum() and len(told["id"]) == 16
    assert "\x1b" not in told["tag"] and told["tag"].encode()
    assert find_runs(tmp_path)[0][0].folder.name == text


def test_a_pipe_named_like_figures_is_no_run(tmp_path: Path) -> None:
    folder = tmp_path / "base_checkpoints" / "d4"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "metrics.jsonl")
    assert Describer().describe(Run("base", folder), 1.0) is None
