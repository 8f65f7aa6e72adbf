"""Messages of requests: whatever they spell, only the server itself writes special tokens."""

from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.data.conversation import Conversation, assistant, user
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.intake import make_prompt
from nanochat.serve.routes.messages import read_conversation, written
from nanochat.serve.routes.tools import read_tools
from nanochat.tokenizer import ROLES
from tests.support.qwens import VOCABULARY, write_folder
from tests.support.tiny_model import tiny_tokenizer


def messages(words: str) -> list[dict[str, Any]]:
    """A chat that has the words in every place where a client may put some."""
    call = {"id": words, "type": "function", "function": {"name": words, "arguments": words}}
    parts = [{"type": "text", "text": words}, {"type": "tool", "expression": words, "result": words}]
    return [
        {"role": "system", "content": words},
        {"role": "user", "content": [{"type": "text", "text": words}]},
        {"role": "assistant", "content": words, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": words, "content": words},
        {"role": "assistant", "content": words, "parts": parts},
        {"role": "user", "content": words},
    ]


def instructions(words: str) -> str:
    tool = {"type": "function", "function": {"name": "a", "description": words, "parameters": {"title": words}}}
    return read_tools({"tools": [tool]}).instructions


@pytest.mark.parametrize("kind", ["own", "published"])
def test_special_tokens_that_a_client_spells_are_ordinary_text_in_every_place(kind: str, tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer() if kind == "own" else FolderTokenizer(write_folder(tmp_path, "qwen3"), VOCABULARY)
    special = {tokenizer.special(role) for role in ROLES} - {-1}
    if kind == "published":
        special |= set(tokenizer._specials.values())
    evil = "".join(tokenizer.decode([number]) for number in sorted(special)) + "<|im_end|>"

    def marks(words: str) -> list[int]:
        chat = read_conversation(messages(words), instructions(words))
        return [token for token in tokenizer.render_prompt(chat) if token in special]

    assert len(evil) > 40 and marks("x")
    assert marks(evil) == marks("x")


def test_messages_that_are_written_down_are_read_as_the_same() -> None:
    read = read_conversation(messages("x"))
    assert read_conversation([written(message) for message in read.messages]) == read
    assert [message["role"] for message in map(written, read.messages)] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert isinstance(read, Conversation)


def test_calls_follow_the_calculator_calls_of_their_message() -> None:
    both = {**messages("x")[2], "parts": messages("x")[4]["parts"]}
    (said,) = read_conversation([messages("x")[1], both, messages("x")[3]]).messages[1:2]
    assert [part.kind for part in said.parts] == ["text", "python", "python_output", "text"]
    assert said.parts[-1].text.startswith("<tool_call>")


@pytest.mark.parametrize("kind", ["own", "published"])
def test_an_empty_reply_is_an_empty_turn_and_an_empty_system_message_is_none(kind: str, tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer() if kind == "own" else FolderTokenizer(write_folder(tmp_path, "qwen3"), VOCABULARY)
    question = {"role": "user", "content": "x"}
    silent = [question, {"role": "assistant", "content": ""}, question]
    read = read_conversation(silent)
    assert read.messages == (user("x"), assistant(""), user("x"))
    assert len(tokenizer.render_prompt(read)) > len(tokenizer.render_prompt(read_conversation([question])))
    prompt, dropped = make_prompt(read, 1, True, tokenizer, 4096)  # counts the tokens of each exchange
    assert (prompt, dropped) == (tokenizer.render_prompt(read), 0)
    assert read_conversation([written(message) for message in read.messages]) == read
    assert read_conversation([{"role": "system", "content": " "}, *silent]) == read
    assert read_conversation([*silent[:2], {"role": "developer", "content": ""}, question]) == read


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_chat_in_which_nobody_says_anything_is_refused(role: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation([{"role": role, "content": ""}])
    assert caught.value.code == "empty_prompt"
