"""Messages of requests: whatever they spell, only the server itself writes special tokens."""

from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.data.conversation import Conversation, Message, assistant, system, user
from nanochat.serve.routes.fields import ApiError, Limits
from nanochat.serve.routes.messages import as_request, make_prompt, read_conversation
from nanochat.serve.routes.tokens import tokenize
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
    assert read_conversation([as_request(message) for message in read.messages]) == read
    assert [message["role"] for message in map(as_request, read.messages)] == [
        "system", "user", "assistant", "user", "assistant", "user",
    ]  # fmt: skip
    assert isinstance(read, Conversation)


def test_calls_follow_the_calculator_calls_of_their_message() -> None:
    both = {**messages("x")[2], "parts": messages("x")[4]["parts"]}
    (said,) = read_conversation([messages("x")[1], both, messages("x")[3]]).messages[1:2]
    assert [part.kind for part in said.parts] == ["text", "python", "python_output", "text"]
    assert said.parts[-1].text.startswith("<tool_call>")


def chat(words: str) -> list[dict[str, str]]:
    """Messages a, b, c, ... of the roles that the letters s, u and a stand for."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[letter], "content": "abcdef"[i]} for i, letter in enumerate(words)]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ("uu", (user("a\n\nb"),)),
        ("ssu", (system("a\n\nb"), user("c"))),
        ("usu", (system("b"), user("a\n\nc"))),
        ("us", (system("b"), user("a"))),
        ("suaus", (system("a\n\ne"), user("b"), assistant("c"), user("d"))),
        ("au", (user(""), assistant("a"), user("b"))),
        ("sau", (system("a"), user(""), assistant("b"), user("c"))),
        ("uaau", (user("a"), assistant("b\n\nc"), user("d"))),
        ("ua", (user("a"), assistant("b"), user(""))),
        ("ss", (user("a\n\nb"),)),
    ],
)
def test_messages_that_do_not_alternate_are_joined_for_our_own_format(sent: str, read: tuple[Message, ...]) -> None:
    tokenizer = tiny_tokenizer()
    (prompt, dropped) = make_prompt(read_conversation(chat(sent)), 1, False, tokenizer, 4096)
    assert (prompt, dropped) == (tokenizer.render_prompt(Conversation(read)), 0)
    assert tokenize({"messages": chat(sent)}, tokenizer, Limits("own", 4096, 2048))["tokens"] == prompt


STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
)
# Like those of Qwen2.5, it takes every order.
FREE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
# It forgets system messages but for the first.
FORGETFUL = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}] {{ m.content }}\n{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "sent", "text"),
    [
        (FREE, "suusua", "[system] a\n[user] b\n[user] c\n[system] d\n[user] e\n[assistant] f\n"),
        (FREE, "au", "[assistant] a\n[user] b\n"),
        (STRICT, "uu", "[user] a\n\nb\n"),
        (STRICT, "au", "[user] \n[assistant] a\n[user] b\n"),
        (STRICT, "su", "[user] a\n\nb\n"),
        (FORGETFUL, "uus", "[system] c\n[user] a\n\nb\n"),
        (FORGETFUL, "uu", "[user] a\n[user] b\n"),
    ],
)
def test_a_template_that_takes_the_order_gets_it(template: str, sent: str, text: str, tmp_path: Path) -> None:
    (write_folder(tmp_path, "qwen3") / "chat_template.jinja").write_text(template)
    tokenizer: Any = FolderTokenizer(tmp_path, VOCABULARY)
    prompt, dropped = make_prompt(read_conversation(chat(sent)), 1, False, tokenizer, 4096)
    assert (tokenizer.decode(prompt), dropped) == (text, 0)


def test_a_chat_in_any_order_is_cut_to_the_context() -> None:
    tokenizer = tiny_tokenizer()
    long = read_conversation([*chat("auua"), *chat("uusa") * 20, *chat("u")])
    prompt, dropped = make_prompt(long, 1, True, tokenizer, 100)
    assert len(prompt) < 100 and dropped > 0 and dropped % 2 == 0


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
    assert read_conversation([as_request(message) for message in read.messages]) == read
    assert read_conversation([{"role": "system", "content": " "}, *silent]) == read
    assert read_conversation([*silent[:2], {"role": "developer", "content": ""}, question]) == read


@pytest.mark.parametrize("role", ["system", "user"])
def test_a_chat_in_which_nobody_says_anything_is_refused(role: str) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation([{"role": role, "content": ""}])
    assert caught.value.code == "empty_prompt"
