"""The command-line parser, and the edge of a script: one message and an exit code."""

import errno
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from nanochat.common import UserError, read_json
from nanochat.data import command_line
from nanochat.data.command_line import parse

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Config:
    """A configuration with every kind of field that the scripts use."""

    device_batch_size: int | Literal["auto"] = "auto"
    """rows of one pass"""
    compile: bool | None = None
    """torch.compile"""
    verbose: bool = False
    shuffle: bool = True
    port: Annotated[int, tyro.conf.arg(aliases=["-p"])] = 8000
    prompt: str | None = None
    lr: float = 0.5


# --- command lines -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("", "device_batch_size", "auto"),
        ("--device_batch_size=4", "device_batch_size", 4),
        ("--device-batch-size 4", "device_batch_size", 4),
        ("--device_batch_size auto", "device_batch_size", "auto"),
        ("-- --lr=1e-3", "lr", 0.001),
        ("--", "lr", 0.5),
        ("-p 9000", "port", 9000),
        ("--port=9000", "port", 9000),
        ("--prompt=--no-verbose=1", "prompt", "--no-verbose=1"),
        ("--prompt True", "prompt", "True"),
    ],
)
def test_parse_reads_values_in_every_published_form(line: str, field: str, value: object) -> None:
    assert getattr(parse(Config, line.split()), field) == value


@pytest.mark.parametrize("flag", ["shuffle", "compile"])
@pytest.mark.parametrize(
    ("form", "value"),
    [
        ("--{}", True), ("--no_{}", False), ("--no-{}", False), ("--{}=True", True), ("--{}=False", False),
        ("--{}=1", True), ("--{}=0", False), ("--{}=true", True), ("--{} False", False), ("--{} 1", True),
    ],
)  # fmt: skip
def test_parse_reads_a_switch_in_every_form(flag: str, form: str, value: bool) -> None:
    config = parse(Config, [*form.format(flag).split(), "--lr", "2"])
    assert getattr(config, flag) is value
    assert config.lr == 2


def test_a_switch_does_not_take_the_flag_after_it() -> None:
    config = parse(Config, ["--compile", "--verbose", "--prompt", "1"])
    assert (config.compile, config.verbose, config.prompt) == (True, True, "1")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--device_batch_siz=4", "--device-batch-size"),
        ("--devicebatchsize 4", "--device-batch-size"),
        ("--device_batch_size=many", "many"),
        ("--lr=fast", "fast"),
        ("word", "word"),
    ],
)
def test_an_unknown_flag_or_a_wrong_value_ends_with_2_and_is_named(
    line: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(Config, line.split())
    assert ended.value.code == 2
    assert named in "".join(capsys.readouterr())


def test_help_shows_the_fields_and_gives_each_launch_line_a_line_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "What it does.\n\npython -m scripts.x\ntorchrun -m scripts.x -- --depth=2    # why\n"
    with pytest.raises(SystemExit) as ended:
        parse(Config, ["--help"], description=text)
    assert ended.value.code == 0
    said = capsys.readouterr().out
    lines = [line.rstrip() for line in said.splitlines()]
    assert "What it does." in lines and "  python -m scripts.x" in lines
    assert "  torchrun -m scripts.x -- --depth=2    # why" in lines
    assert all(words in said for words in ("--device-batch-size", "rows of one pass", "default: auto"))


def test_settings_give_back_the_command_line() -> None:
    assert command_line.settings(parse(Config, ["--lr=2"])) == {
        "device_batch_size": "auto", "compile": None, "verbose": False, "shuffle": True, "port": 8000,
        "prompt": None, "lr": 2.0,
    }  # fmt: skip


# --- the edge of a script ------------------------------------------------------------------------


def end(failure: BaseException | None, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of a script whose main raises `failure`."""
    monkeypatch.setattr(sys, "argv", ["script", *words])

    def main(config: Config) -> None:
        if failure is not None:
            raise failure

    try:
        command_line.run(main, Config)
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (UserError("no data; prepare some"), 1, "error: no data; prepare some"),
        (UserError("no data; prepare some", 2), 2, "error: no data; prepare some"),
        (KeyboardInterrupt(), 130, "stopped"),
        (OSError(errno.ENOSPC, "", "/data/model"), 1, "error: the disk is full (/data/model)"),
        (OSError(errno.EACCES, "denied", "/data"), 1, "error: /data: permission denied. "),
        (OSError(errno.EROFS, "read-only", "/data"), 1, "error: /data: the file system can only be read. "),
    ],
)
def test_a_failure_that_is_no_bug_is_one_message_and_a_code(
    failure: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert end(failure, monkeypatch) == code
    said = capsys.readouterr().err
    assert said.startswith(message) and said.count("\n") == 1


def test_a_wrong_switch_is_a_message_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert end(None, monkeypatch, "--verbose=maybe") == 2
    assert "--verbose takes True, False, 1 or 0, got 'maybe'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "failure", [OSError(errno.EHOSTUNREACH, "unreachable"), ZeroDivisionError(), BrokenPipeError()]
)
def test_other_failures_show_their_traceback_and_a_remedy_once(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert end(failure, monkeypatch) == 1
    said = capfd.readouterr().err
    assert said.count("Traceback") == 1
    last = said.splitlines()[-1]
    assert last.startswith(f"error: {type(failure).__name__}") and "docs/en/troubleshooting.md" in last


def test_the_traceback_of_a_user_error_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_TRACEBACK", "1")
    assert end(UserError("no data"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


def unread(*command: str) -> tuple[int, str]:
    """The exit code and the errors of a program whose standard output has no reader."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    return done.returncode, done.stderr


def test_a_program_whose_reader_has_gone_ends_without_a_word() -> None:
    script = (
        "from nanochat.common import Pulse; from nanochat.data.command_line import run; "
        "run(lambda cfg: print('x'), Pulse)"
    )
    assert unread("-c", script) == unread("-c", script, "--help") == (141, "")
    assert unread("check_npu.py", "--help") == (-signal.SIGPIPE, "")


def test_another_rank_waits_for_rank_0_and_speaks_if_it_fails_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(command_line.time, "sleep", waited.append)
    assert end(UserError("no data"), monkeypatch) == 1
    assert waited == [command_line.RANK_0_SECONDS] and capsys.readouterr().err == "error: no data (rank 3)\n"
    assert end(None, monkeypatch, "--dept=3") == 2 and capsys.readouterr() == ("", "")
    assert waited == 2 * [command_line.RANK_0_SECONDS]  # the mistakes that the parser finds wait too
    assert end(None, monkeypatch, "--help") == 0 and len(waited) == 2


def test_the_reason_of_the_end_is_left_for_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun, ours = tmp_path / "error.json", tmp_path / "reason"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(torchrun))
    monkeypatch.setenv("NANOCHAT_REASON_FILE", str(ours))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert end(UserError("no data; prepare some"), monkeypatch) == 1
    assert ours.read_text() == "error: no data; prepare some (rank 0)\n"
    note = read_json(torchrun)["message"]
    assert note["message"] == note["extraInfo"]["py_callstack"] == "error: no data; prepare some (rank 0)"
    assert int(note["extraInfo"]["timestamp"]) > 0
    monkeypatch.delenv("WORLD_SIZE")
    assert end(ZeroDivisionError("one too many"), monkeypatch) == 1
    assert ours.read_text().startswith("error: ZeroDivisionError: one too many")
    assert end(None, monkeypatch, "--dept=3") == 2 and "the command line was refused" in ours.read_text()


@pytest.mark.parametrize(
    "encoding", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_terminal_without_the_characters_gets_their_escapes(encoding: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "chinese.py"
    says = (
        "from nanochat.common import Pulse, log, warn\nfrom nanochat.data.command_line import run\n"
        "run(lambda cfg: (log('法国'), warn('首都')), Pulse)"
    )
    script.write_text(says, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], env={**os.environ, **encoding}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b"\\u6cd5\\u56fd\n" and b"\\u9996\\u90fd" in done.stderr
