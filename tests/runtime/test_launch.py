"""After a failed launch the last line says which rank failed and why, and one host listens on 127.0.0.1 only."""

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from nanochat.runtime.launch import reason
from tests.support.forks import forks

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = ("torch.distributed.run", "--standalone")
OURS = ("nanochat.runtime.launch",)
REFUSED = "error: depth must be a multiple of 3, got 4; write --depth=3"

pytestmark = pytest.mark.ranks


def start(launcher: tuple[str, ...], *words: str, **environment: str) -> tuple[int, str, str]:
    """The exit code of a launcher with two ranks, and what was printed to standard output and to standard error."""
    return forks().run([*launcher, "--nproc_per_node=2", *words], ROOT, {**os.environ, **environment})


def fail(launcher: tuple[str, ...], fault: str, *flags: str, **environment: str) -> tuple[int, list[str]]:
    code, _, errors = start(launcher, "-m", "tests.support.failing", "--", *flags, FAULT=fault, **environment)
    return code, errors.splitlines()


def test_the_last_line_names_the_rank_and_its_reason() -> None:
    code, lines = fail(OURS, "refuse 1")
    assert code == 1 and lines[-1] == f"{REFUSED} (rank 1)", "\n".join(lines)
    assert not [line for line in lines if "ChildFailedError" in line], "no traceback of the launcher"


@pytest.mark.parametrize("script", [False, True])
def test_the_reason_is_printed_once_by_the_outermost_caller(script: bool, tmp_path: Path) -> None:
    note = tmp_path / "reason"
    _, lines = fail(OURS, "refuse all", **({"NANOCHAT_REASON_FILE": str(note)} if script else {}))
    expected = [f"{REFUSED} (rank 0)"]
    assert [line for line in lines if REFUSED in line] == ([] if script else expected), "\n".join(lines)
    assert not script or note.read_text().splitlines() == expected


def test_the_launcher_leaves_the_reason_of_a_rank_that_was_killed(tmp_path: Path) -> None:
    """Without a caller it is the last line, as any other reason is."""
    note = tmp_path / "reason"
    code, _ = fail(OURS, "kill 1", NANOCHAT_REASON_FILE=str(note))
    assert code == 128 + signal.SIGKILL
    assert note.read_text().startswith("error: rank 1 was killed (SIGKILL). ")


def test_a_reason_that_no_caller_got_is_printed_by_its_rank() -> None:
    _, lines = fail(OURS, "refuse all", NANOCHAT_REASON_FILE="/dev/full")
    assert lines == [f"{REFUSED} (rank 0)"], "the launcher prints what a full disk kept from the script"


def test_a_wrong_flag_is_shown_once_and_its_code_is_returned() -> None:
    code, lines = fail(OURS, "refuse all", "--dept=3")
    assert code == 2 and lines[-1] == "error: the command line was refused; the lines above say why (rank 0)"
    assert sum("--dept=3" in line for line in lines) == 1


def test_under_torchrun_the_root_cause_is_the_reason_and_ranks_that_refuse_alike_say_it_once() -> None:
    _, lines = fail(TORCHRUN, "refuse all")
    assert set(lines[-1]) == {"="}
    assert lines[-2] == f"  traceback : {REFUSED} (rank 0)", "\n".join(lines)
    assert lines.count(REFUSED) == 1


def test_a_bug_that_all_ranks_meet_shows_one_traceback_and_a_remedy() -> None:
    code, lines = fail(OURS, "bug all")
    assert code == 1 and sum(line.startswith("Traceback") for line in lines) == 1, "\n".join(lines)
    assert "ZeroDivisionError" in lines[-1] and lines[-1].endswith("(rank 0)")
    assert sum("troubleshooting" in line for line in lines) == 1, "the remedy stands once"
    assert not [line for line in lines if "elastic" in line], "no lines of the launcher's library"


def failure(rank: int, code: int, folder: Path, note: str = "") -> ProcessFailure:
    """How torchrun describes the end of a rank."""
    path = folder / f"{rank}.json"
    path.unlink(missing_ok=True)
    if note:
        about = {"py_callstack": note, "timestamp": "5"}
        path.write_text(json.dumps({"message": {"message": note, "extraInfo": about}}))
    return ProcessFailure(rank, 4711, code, str(path))


def test_the_rank_to_blame_is_not_one_that_the_launcher_ended(tmp_path: Path) -> None:
    ended = failure(0, -15, tmp_path)
    assert reason({0: ended, 1: failure(1, -9, tmp_path)}).startswith("error: rank 1 was killed (SIGKILL). If nobody")
    assert reason({0: ended, 1: failure(1, -11, tmp_path)}).startswith("error: rank 1 was ended by SIGSEGV; the lines ")
    assert reason({0: ended, 1: failure(1, 3, tmp_path)}) == "error: rank 1 ended with code 3; the lines above say why"
    late = failure(0, -9, tmp_path)  # it did not stop within 30 seconds of the launcher's SIGTERM
    assert reason({0: late, 1: failure(1, 1, tmp_path, "error: no data (rank 1)")}) == "error: no data (rank 1)"
    named = failure(0, 1, tmp_path, "error: rank 1 is gone in step 7. (rank 0)")
    said = reason({0: named, 1: failure(1, -9, tmp_path)})
    assert said.startswith("error: rank 1 is gone in step 7. (rank 0) Rank 1 was killed (SIGKILL). If nobody killed")


LISTENING = """
import os, torch.distributed as dist
from nanochat import device
compute = device.compute_init("cpu")
device.barrier(compute)
if dist.get_rank() == 0:
    folders = [f"/proc/{pid}/fd" for pid in (os.getpid(), os.getppid())]
    paths = [f"{folder}/{name}" for folder in folders for name in os.listdir(folder)]
    mine = {os.readlink(path) for path in paths if os.path.islink(path)}
    for name in ("tcp", "tcp6"):
        for line in open(f"/proc/net/{name}").read().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in mine:
                print("listens on", fields[1].split(":")[0])
device.barrier(compute)
device.compute_cleanup()
assert not dist.is_initialized()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_of_one_host_meet_and_listen_to_nothing_outside_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "listening.py"
    script.write_text(LISTENING)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    code, said, errors = start(OURS, str(script), PYTHONPATH=str(ROOT), NANOCHAT_DTYPE="float32")
    assert code == 0, errors
    assert set(re.findall(r"listens on (\w+)", said)) == {"0100007F"}, said
    assert said.count("2 ranks over gloo") == 1


def test_a_port_in_use_is_named_with_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        hosts = ["--nnodes=2", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}"]
        code, lines = fail((*OURS, *hosts), "refuse all")
    last = lines[-1]
    assert code == 1
    assert last.startswith(f"error: MASTER_PORT={port} is taken by another process on this host; start again with a ")
    assert last.endswith("(launcher of host 0)")


def test_a_launcher_that_is_stopped_prints_only_the_reason(tmp_path: Path) -> None:
    script = tmp_path / "stops.py"
    script.write_text("import os, signal, time\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)\n")
    code, _, errors = start(OURS, "--nproc_per_node=1", str(script))
    assert code == 128 + signal.SIGTERM
    assert errors.splitlines() == ["stopped by SIGTERM; the same command, without --resume, resumes"]
