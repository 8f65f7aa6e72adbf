"""Input and output of a terminal chat. The test of chat_cli types into a real terminal."""

import io
import os
import signal

import pytest

from nanochat.serve import terminal


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
    monkeypatch.delenv("LC_MESSAGES", raising=False)
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
