"""What a finished stage says to type next: commands that parse, with its stage and its tag."""

import shlex

import pytest

from nanochat.runtime import next_commands
from tests.repository.test_docs import problem


@pytest.mark.parametrize("stage", next_commands.NEXT)
def test_every_next_command_parses_and_names_the_run(stage: str) -> None:
    commands = next_commands.after(stage, "my tag")
    assert commands and [why for line in commands if (why := problem(shlex.split(line)))] == []
    assert all("my tag" in shlex.split(line) for line in commands)


def test_a_fine_tuned_model_is_chatted_with_shown_and_exported() -> None:
    modules = [line.split()[2] for line in next_commands.after("tune", "mine")]
    assert modules == ["scripts.chat_cli", "scripts.chat_web", "nanochat.export"]


def test_under_speedrun_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    next_commands.show("rl", "d4")
    assert "chat_cli" in capsys.readouterr().out
    monkeypatch.setenv("NANOCHAT_REASON_FILE", "/tmp/reason")
    next_commands.show("rl", "d4")
    assert capsys.readouterr().out == ""
