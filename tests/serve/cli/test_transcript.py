"""Chats as files: a saved chat reads back the same, and any other file is refused."""

import json

import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Message, Part, assistant, system, user
from nanochat.serve.cli.transcript import read_transcript, write_transcript


def test_a_chat_with_calculator_calls_is_read_as_it_was_written(tmp_path):
    call = (Part("python", "1+1"), Part("python_output", "2"))
    messages = [system("be brief"), user("1+1 等于几？"), assistant("It is ", *call, "2."), user("so"), assistant("so")]
    write_transcript(tmp_path / "chat.json", messages)
    assert read_transcript(tmp_path / "chat.json") == messages
    assert "等于几" in (tmp_path / "chat.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"messages": 3}', b'{"messages": [{"role": "user", "content": "a"}]}',
     b'{"messages": [{"role": "robot", "content": "a"}]}', b"\xff\xfe",
     b'{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "b"}]}'],
)  # fmt: skip
def test_a_file_that_is_not_a_chat_is_refused_in_words(content, tmp_path):
    path = tmp_path / "chat.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not a chat"):
        read_transcript(path)


def test_other_programs_chats_are_read(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    assert read_transcript(path) == [user("a"), assistant("b")]
    messages: list[Message] = []
    write_transcript(path, messages)
    assert read_transcript(path) == []


def test_halves_of_surrogate_pairs_are_replaced_so_that_the_chat_can_be_saved(tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(
        '{"messages": [{"role": "user", "content": "hi \\ud800"}, {"role": "assistant", "content": "\\ud83d\\ude00"}]}'
    )
    messages = read_transcript(path)
    assert messages == [user("hi \ufffd"), assistant("😀")]
    write_transcript(path, [system("of a flag: \udcff"), *messages])  # as Python reads a byte that is not UTF-8
    assert read_transcript(path) == [system("of a flag: \ufffd"), *messages]
