"""Input and output of a terminal chat. The test of chat_cli types into a real terminal."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat.serve.cli import terminal


@pytest.mark.parametrize(
    ("asked", "environment", "lang"),
    [
        ("auto", {"LANG": "zh_CN.UTF-8"}, "zh"),
        ("auto", {"LANG": "zh_CN.UTF-8", "LC_ALL": "en_US.UTF-8"}, "en"),
        ("auto", {"LANG": "C", "LC_MESSAGES": "zh_TW"}, "zh"),
        ("auto", {"LANG": ""}, "en"),
        ("zh", {"LANG": "en_US.UTF-8"}, "zh"),
    ],
)
def test_the_language_is_the_flag_or_the_terminals(asked, environment, lang, monkeypatch):
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert terminal.language(asked) == lang


def test_several_lines_stand_between_triple_quotes(monkeypatch):
    lines = iter(['"""one', "", 'two"""', "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    assert terminal.ask() == "one\n\ntwo" and terminal.ask() == "/quit"


def test_ctrl_c_breaks_into_the_question_once_and_into_nothing_else(monkeypatch):
    def press() -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return "typed"

    monkeypatch.setattr("builtins.input", lambda prompt: press())
    before = signal.getsignal(signal.SIGINT)
    with terminal.keyboard() as ask:
        assert press() == "typed"
        with pytest.raises(KeyboardInterrupt):
            ask()
        assert press() == "typed"
        monkeypatch.setattr("builtins.input", lambda prompt: "next")
        assert ask() == "next" and press() == "typed"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_what_the_first_asked_to_stop():
    with pytest.raises(KeyboardInterrupt), terminal.stoppable() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        os.kill(os.getpid(), signal.SIGINT)


def test_what_is_no_terminal_gets_no_colours(monkeypatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert terminal.dim("a", io.StringIO()) == "a" and terminal.dim("a", Screen()) == "\033[2ma\033[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.dim("a", Screen()) == "a"


# --- a real terminal -----------------------------------------------------------------------------

ASK = """
import sys
from pathlib import Path
from nanochat.serve.cli.terminal import history, keyboard
sys.stdin.reconfigure(encoding="utf-8")
with history(Path(sys.argv[1])) as problem, keyboard() as ask:
    print("ready", ascii(problem), flush=True)
    while (text := ask()) != "/quit":
        print("got", ascii(text), flush=True)
"""


def typed(folder: Path, keys: list[bytes], environment: dict[str, str], kept: Path | None = None) -> str:
    """What a terminal shows while somebody types lines at it; `folder` is the working directory."""
    keyboard, screen = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ASK, str(kept or folder / "history")],
        cwd=folder,
        stdin=screen,
        stdout=screen,
        stderr=screen,
        env={**{k: v for k, v in os.environ.items() if k[:3] != "LC_" and k != "LANG"}, "TERM": "xterm",
             "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    os.close(screen)
    shown = b""

    def until(text: bytes, times: int) -> None:
        nonlocal shown
        while shown.count(text) < times:
            assert select.select([keyboard], [], [], 60)[0], shown
            try:
                shown += os.read(keyboard, 4096)
            except OSError as ended:  # the program has closed the terminal
                raise AssertionError(shown) from ended

    try:
        for number, line in enumerate(keys, 1):
            until(b"> ", number)  # before that, the terminal itself would edit the line, byte by byte
            os.write(keyboard, line + b"\n")
            until(b"got ", number)
        until(b"> ", len(keys) + 1)
        os.write(keyboard, b"/quit\n")
        assert process.wait(60) == 0, shown
    finally:
        process.kill()
        os.close(keyboard)
    return shown.decode(errors="replace")


ROOT = Path(__file__).resolve().parent.parent.parent.parent
LOCALES = [{"LANG": "zh_CN.NOT-INSTALLED"}, {"LC_ALL": "C.UTF-8"},
           {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]  # fmt: skip


@pytest.mark.parametrize("environment", LOCALES, ids=lambda one: ",".join(f"{k}={v}" for k, v in one.items()))
def test_chinese_arrives_as_it_was_typed_whatever_the_locale(environment, tmp_path):
    """Without a UTF-8 locale the line editor took bytes for keys with Alt: it listed the folder, or recalled lines."""
    (tmp_path / "a-file-of-the-folder").touch()
    backspace = "企鹅会飞吗吗".encode() + b"\x7f" + "？".encode()
    shown = typed(tmp_path, ["法国的首都是哪里？".encode(), backspace, b"a\tb"], environment)
    said = [line.partition("got ")[2].strip() for line in shown.splitlines() if "got " in line]
    assert said == [ascii("法国的首都是哪里？"), ascii("企鹅会飞吗？"), ascii("a\tb")]
    assert "a-file-of-the-folder" not in shown
    assert (tmp_path / "history").read_text("utf-8").splitlines()[:1] == ["法国的首都是哪里？"]
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("place", ["/proc/no-such-folder/history", "folder", "pipe", "link", "loose"])
def test_a_history_that_cannot_be_written_does_not_end_the_chat(place, tmp_path):
    """Nor is anything written through a link, and a pipe is not waited for."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "loose").symlink_to(tmp_path / "missing")
    shown = typed(tmp_path, [b"hello"], {"LC_ALL": "C.UTF-8"}, kept=tmp_path / place)
    assert "got 'hello'" in shown and "ready ''" not in shown and "Traceback" not in shown
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "missing").exists()
