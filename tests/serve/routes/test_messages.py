"""Messages of requests: whatever they spell, only the server itself writes special tokens."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.data.conversation import Conversation, Message, assistant, system, user
from nanochat.serve.formats.values import NO_JSON
from nanochat.serve.routes.chat import read_chat
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from nanochat.serve.routes.fitted import fitted, read_options, written
from nanochat.serve.routes.messages import alternating, as_request, read_conversation
from nanochat.serve.routes.prompts import PromptTooLong, make_prompt
from nanochat.serve.routes.tokens import tokenize
from nanochat.serve.routes.tools import Tools, read_tools
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


def described(words: str) -> Tools:
    tool = {"type": "function", "function": {"name": "a", "description": words, "parameters": {"title": words}}}
    return read_tools({"tools": [tool]})


@pytest.mark.parametrize("kind", ["own", "published"])
def test_special_tokens_that_a_client_spells_are_ordinary_text_in_every_place(kind: str, tmp_path: Path) -> None:
    tokenizer: Any = tiny_tokenizer() if kind == "own" else FolderTokenizer(write_folder(tmp_path, "qwen3"), VOCABULARY)
    special = {tokenizer.special(role) for role in ROLES} - {-1}
    if kind == "published":
        special |= set(tokenizer.specials.values())
    evil = "".join(tokenizer.decode([number]) for number in sorted(special)) + "<|im_end|>"

    def marks(words: str) -> list[int]:
        chat = fitted(read_conversation(messages(words)), described(words), {"x": words}, tokenizer)
        return [token for token in tokenizer.render_prompt(chat) if token in special]

    assert len(evil) > 40 and marks("x")
    assert marks(evil) == marks("x")


def test_messages_that_are_written_down_are_read_as_the_same() -> None:
    read = read_conversation(messages("x"))
    assert read_conversation([as_request(message) for message in read.messages]) == read
    assert [message["role"] for message in map(as_request, read.messages)] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    assert isinstance(read, Conversation)


def test_calls_follow_the_calculator_calls_of_their_message() -> None:
    both = {**messages("x")[2], "parts": messages("x")[4]["parts"]}
    (said,) = written(read_conversation([messages("x")[1], both, messages("x")[3]])).messages[1:2]
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


# --- calls, results and thoughts -----------------------------------------------------------------

QUESTION = {"role": "user", "content": "Rain?"}


def called(*ids: str | None) -> dict[str, Any]:
    calls = [{"id": i, "type": "function", "function": {"name": "a", "arguments": "{}"}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(text: str, number: str | None = None) -> dict[str, Any]:
    return {"role": "tool", "content": text, **({} if number is None else {"tool_call_id": number})}


@pytest.mark.parametrize(
    ("sent", "texts"),
    [
        ([called("1", "2"), result("one", "1"), result("two", "2")], "two calls, one, two"),
        ([called("1", "2"), result("two", "2"), result("one", "1")], "two calls, one, two"),
        ([called("1", "2"), result("two"), result("one")], "two calls, two, one"),
        ([called("1"), called("2"), result("two", "2"), result("one", "1")], "two calls, one, two"),
        ([called("1"), result("one", "1"), called("2"), result("two", "2")], "one calls, one, one calls, two"),
        ([called("1"), QUESTION, result("one", "1")], "one calls, one, Rain?"),
        ([called("1"), result("one", "1"), called("1"), result("two", "1")], "one calls, one, one calls, two"),
        ([called("1", "2"), result("two", "2"), QUESTION], "two calls, two, Rain?"),
        ([called(None), result("one"), called("1"), result("two")], "one calls, one, one calls, two"),
        ([called(""), result("one", ""), called("1"), result("two", "")], "one calls, one, one calls, two"),
    ],
)
def test_results_follow_their_calls_whatever_order_a_client_sends(sent: list[dict[str, Any]], texts: str) -> None:
    read = read_conversation([QUESTION, *sent]).messages[1:]
    counts = {0: "", 1: "one calls", 2: "two calls"}
    assert ", ".join(turn.text or counts[len(turn.fields.get("tool_calls", ()))] for turn in read) == texts
    assert read_conversation([as_request(turn) for turn in (user("x"), *read)]).messages[1:] == read


@pytest.mark.parametrize(
    "sent", [[result("x")], [QUESTION, result("x", "1")], [called("1"), QUESTION, result("x", "2")]]
)
def test_a_result_of_no_call_is_refused(sent: list[dict[str, Any]]) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation([*sent, QUESTION])
    assert caught.value.param == f"messages[{len(sent) - 1}].role"


# Writes as Qwen3 does: tools in a section, calls, results, and only the last thought.
THINKER = (
    "{% if tools %}[tools]{% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}"
    "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif reasoning_effort is defined %}{{ reasoning_effort }}{% endif %}{% endif %}"
)
CODER = THINKER.replace("<tool_call>{{ c.function.name }}", "<tool_call><function={{ c.function.name }}>")


# Writes as Mistral's models do, and refuses IDs of other lengths, and questions that follow no reply.
NINE = "{% if {id} | length != 9 %}{{ raise_exception('IDs have 9 characters') }}{% endif %}{{ {id} }}"
LISTED = (
    "{% set turns = namespace(users=0, all=0) %}{% for m in messages %}{% if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (turns.all % 2 == 0) %}{{ raise_exception('not in turns') }}{% endif %}"
    "{% set turns.all = turns.all + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[tools]{{ tools[0].function.name }}{% endif %}"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{{ (c.function | tojson)[:-1] }}, \"id\": \"" + NINE.replace("{id}", "c.id") + "\"}{{ ', ' if not loop.last }}"
    "{% endfor %}]{% elif m.role == 'tool' %}[result]{{ m.content }} " + NINE.replace("{id}", "m.tool_call_id") +
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)  # fmt: skip
NAMED = LISTED.replace(
    "[TOOL_CALLS][{% for c in m.tool_calls %}{{ (c.function | tojson)[:-1] }}, ",
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}, ",
)
# Writes as Llama 3.1 to 3.3 do, and refuses several calls in a reply.
BARE = (
    "{% for m in messages %}[{{ m.role }}]{% if loop.first and tools %}{{ tools[0].function.name }} {% endif %}"
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('single tool-calls') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def folder(tmp_path: Path, template: str) -> Any:
    (write_folder(tmp_path, "qwen3") / "chat_template.jinja").write_text(template)
    return FolderTokenizer(tmp_path, VOCABULARY)


def test_a_template_gets_tools_calls_and_results_as_they_are(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, THINKER)
    assert (tokenizer.call_format, tokenizer.thought_marks) == ("json", ("<think>", "</think>"))
    sent = [QUESTION, {**called("1"), "reasoning_content": "hm"}, result("rain", "1")]
    chat = fitted(read_conversation(sent), described("x"), {}, tokenizer)
    prompt, dropped = make_prompt(chat, 1, False, tokenizer, 4096)
    text = "[tools]a [user]Rain?[assistant]<tool_call>a {}</tool_call>[tool]rain[assistant]"
    assert (tokenizer.decode(prompt), dropped) == (text, 0)


def test_exchanges_with_calls_are_dropped_as_a_whole(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, THINKER)
    exchange = [QUESTION, called("1"), result("rain " * 9, "1"), {"role": "assistant", "content": "Yes"}]
    chat = fitted(read_conversation([*exchange * 9, *exchange[:3]]), described("x"), {}, tokenizer)
    prompt, dropped = make_prompt(chat, 1, True, tokenizer, 400)
    assert dropped % 4 == 0 and 0 < dropped < 36
    assert tokenizer.decode(prompt).startswith("[tools]a [user]Rain?[assistant]<tool_call>")
    assert len(make_prompt(chat, 1, True, tokenizer, 150)[0]) < 150


@pytest.mark.parametrize("before", [(), (system("Be brief."),)], ids=["", "with instructions"])
def test_what_a_template_writes_once_or_leaves_out_counts_for_no_exchange(
    before: tuple[Message, ...], tmp_path: Path
) -> None:
    """Templates begin a chat with instructions of their own, and leave out earlier thoughts."""
    own = "{% if messages[0].role != 'system' %}[system]You are a helpful model.{% endif %}"
    tokenizer = folder(tmp_path, own + THINKER)
    exchange = (user("Rain?"), replace(assistant("Yes"), fields={"reasoning_content": "hm " * 40}))
    chat = Conversation((*before, *exchange * 40, user("Snow?")))
    prompt, dropped = make_prompt(chat, 1, True, tokenizer, 200)
    older = replace(chat, messages=(*before, *chat.messages[len(before) + dropped - 2 :]))
    assert len(prompt) < 200 <= len(tokenizer.render_prompt(older))


def test_an_old_exchange_that_the_template_refuses_is_the_mistake_of_the_client(tmp_path: Path) -> None:
    refuses = "{% for m in messages %}{% if 'bad' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
    tokenizer = folder(tmp_path, refuses + THINKER)
    chat = Conversation((user("bad"), assistant("Yes"), *(user("Rain?"), assistant("Yes")) * 5, user("Snow?")))
    with pytest.raises(ApiError, match="refuses input"):
        make_prompt(chat, 1, True, tokenizer, 4096, "input")


def test_messages_in_a_row_become_one_with_the_thoughts_and_calls_of_both(tmp_path: Path) -> None:
    def thinking(number: str) -> dict[str, Any]:
        return {**called(number), "reasoning_content": f"thought {number}"}

    (_, both, *_) = read_conversation(
        [QUESTION, thinking("1"), thinking("2"), result("x", "1"), result("y", "2")]
    ).messages
    assert both.fields["reasoning_content"] == "thought 1\n\nthought 2"
    assert [call["id"] for call in both.fields["tool_calls"]] == ["1", "2"]
    said = [{"role": "assistant", "content": "a", "reasoning_content": text} for text in ("one", "two")]
    plain = alternating(read_conversation([QUESTION, *said, QUESTION]))
    assert plain.messages[1].fields == {"reasoning_content": "one\n\ntwo"}
    assert plain.messages[1].text == "a\n\na"


@pytest.mark.parametrize(
    ("texts", "joined"),
    [(("Let me see.", "Soon."), "Let me see.\n\nSoon."), (("a", ""), "a"), (("", "a"), "a"), (("", ""), "")],
)
def test_a_blank_line_separates_the_words_of_messages_in_a_row(texts: tuple[str, str], joined: str) -> None:
    first, second = ({"role": "assistant", "content": text} for text in texts)
    after = [result("x", "1"), QUESTION]
    for sent in (
        [{**called("1"), **first}, second, *after],
        [first, {**called("1"), **second}, *after],
        [first, second, QUESTION],
    ):
        assert alternating(read_conversation([QUESTION, *sent])).messages[1].text == joined


def test_the_marks_that_close_a_continued_thought_count(tmp_path: Path) -> None:
    """They come before the beginning of the reply, and a chat that has no room for them is cut or refused."""
    opens = THINKER.replace("[assistant]{% if enable", "[assistant]<think>{% if enable")
    tokenizer = folder(tmp_path, opens)
    begun = [QUESTION, {"role": "assistant", "content": "Yes"}]
    body = {"messages": begun, "continue_final_message": True, "max_tokens": 1}
    defaults, count = (
        Defaults(1.0, 0.0, 0, 20),
        tokenize({**body, "max_tokens": None}, tokenizer, Limits("m", 4096, VOCABULARY))["count"],
    )
    chat = read_chat(body, Limits("m", 4096, VOCABULARY), defaults)
    (prompt, _) = chat.work(tokenizer, Limits("m", 4096, VOCABULARY)).requests[0]
    assert tokenizer.decode(prompt).endswith("<think>\n</think>\n\nYes") and len(prompt) == count
    assert chat.work(tokenizer, Limits("m", count + 1, VOCABULARY)).requests[0][0] == prompt
    with pytest.raises(PromptTooLong):
        chat.work(tokenizer, Limits("m", count, VOCABULARY))
    longer = {**body, "messages": [QUESTION, {"role": "assistant", "content": "No"}, *begun], "truncation": "auto"}
    work = read_chat(longer, Limits("m", 4096, VOCABULARY), defaults).work(
        tokenizer, Limits("m", count + 1, VOCABULARY)
    )
    assert work.requests[0][0] == prompt


@pytest.mark.parametrize(("opening", "end"), [("", "<think>\nI add."), ("<think>", "<think>I add.")])
def test_an_answer_continues_after_its_own_thought_as_far_as_there_is_room(
    opening: str, end: str, tmp_path: Path
) -> None:
    """The model went on without what it had thought before it began the answer."""
    tokenizer = folder(tmp_path, THINKER.replace("[assistant]{% if enable", f"[assistant]{opening}{{% if enable"))
    begun = {"role": "assistant", "content": "Yes", "reasoning_content": "I add."}
    body = {"messages": [QUESTION, begun], "continue_final_message": True, "max_tokens": 5}

    def prompt(context: int, **more: Any) -> list[int]:
        limits = Limits("m", context, VOCABULARY)
        chat = read_chat({**body, **more}, limits, Defaults(1.0, 0.0, 0, 20))
        return chat.work(tokenizer, limits).requests[0][0]

    whole = prompt(4096)
    assert tokenizer.decode(whole).endswith(f"{end}\n</think>\n\nYes")
    assert tokenize({**body, "max_tokens": None}, tokenizer, Limits("m", 4096, VOCABULARY))["count"] == len(whole)
    assert prompt(len(whole) + 5) == whole and "I add." not in tokenizer.decode(prompt(len(whole) + 4))
    assert "I add." not in tokenizer.decode(prompt(4096, enable_thinking=False))


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        ("", {}), (" \n", {}), ("{ }", {}), ("{}", {}), ('{"a": "\\ud800"}', {"a": "\ufffd"}),
        ("[1]", "[1]"), ('{"a": NaN}', '{"a": NaN}'), ("[" * 900, "[" * 900),
    ],
)  # fmt: skip
def test_arguments_of_earlier_calls_are_an_object_where_the_template_needs_one(
    arguments: str, read: Any, tmp_path: Path
) -> None:
    call = called("1")
    call["tool_calls"][0]["function"]["arguments"] = arguments
    sent = read_conversation([QUESTION, call, result("rain", "1")])
    assert sent.messages[1].fields["tool_calls"][0]["function"]["arguments"] == read
    each = "{% for key, value in c.function.arguments | items %}{{ key }}={{ value }}{% endfor %}"
    tokenizer = folder(tmp_path, CODER.replace("{{ c.function.arguments | tojson }}", each))
    prompt, _ = make_prompt(fitted(sent, described("x"), {}, tokenizer), 1, False, tokenizer, 4096)
    written_out = "".join(
        f"{key}={value}" for key, value in (read if isinstance(read, dict) else {NO_JSON: read}).items()
    )
    assert f"<function=a> {written_out}</tool_call>" in tokenizer.decode(prompt)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (CODER, "xml"),
        (LISTED, "list"),
        (NAMED, "args"),
        (BARE, "bare"),
        (BARE.replace('{"name', '<call>{"name'), None),
        (LISTED.replace("c.function | tojson", "{'id': 1, 'name': c.function.name} | tojson"), None),
        (FREE, None),
        (THINKER.replace("tool_call>", "call>"), None),
        (THINKER.replace("tools", "x"), None),
    ],
)
def test_the_form_of_calls_is_the_one_that_the_template_writes(template: str, form: str | None, tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, template)
    assert tokenizer.call_format == form
    if form is None:  # the tools are described, and calls are text
        chat = fitted(read_conversation([QUESTION, called("1"), result("rain", "1")]), described("x"), {}, tokenizer)
        text = tokenizer.decode(make_prompt(chat, 1, False, tokenizer, 4096)[0])
        assert "<tools>" in text and "<tool_response>rain</tool_response>" in text


def test_a_template_that_takes_ids_of_nine_characters_gets_the_same_ones_every_time(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, LISTED)
    assert (tokenizer.call_format, tokenizer.takes_tools) == ("list", True)
    long_id = "call_0123456789abcdef01234567"
    sent = [QUESTION, called(long_id, "abcdefgh1"), result("snow", "abcdefgh1"), result("rain", long_id)]
    chat = fitted(read_conversation(sent), described("x"), {}, tokenizer)
    first = tokenizer.decode(make_prompt(chat, 1, False, tokenizer, 4096)[0])
    short = first.partition("[result]rain ")[2][:9]
    call = '{{"name": "a", "arguments": {{}}, "id": "{}"}}'.format
    calls = f"[TOOL_CALLS][{call(short)}, {call('abcdefgh1')}]"
    assert first == f"[tools]a[INST]Rain?[/INST]{calls}[result]rain {short}[result]snow abcdefgh1"
    more = [*sent, {"role": "assistant", "content": "Yes"}, QUESTION]
    chat = fitted(read_conversation(more), described("x"), {}, tokenizer)
    longer = tokenizer.decode(make_prompt(chat, 1, False, tokenizer, 4096)[0])
    assert longer == f"{first}Yes</s>[tools]a[INST]Rain?[/INST]"


def test_several_calls_of_a_reply_are_written_one_by_one_where_the_template_takes_one(tmp_path: Path) -> None:
    tokenizer = folder(tmp_path, BARE)
    sent = [QUESTION, called("1", "2"), result("snow", "2"), result("rain", "1")]
    call = '[assistant]{"name": "a", "parameters": {}}'
    for more, end in (([], ""), ([system("x")], "[system]x")):  # in the order of training, and as sent
        chat = fitted(read_conversation(sent), described("x"), {}, tokenizer)
        chat = replace(chat, messages=(*chat.messages, *more))
        prompt, _ = make_prompt(chat, 1, False, tokenizer, 4096)
        assert tokenizer.decode(prompt) == f"[user]a Rain?{call}[tool]rain{call}[tool]snow{end}[assistant]"


def test_a_question_beside_a_result_follows_an_empty_reply_where_the_template_wants_one(tmp_path: Path) -> None:
    """Clients of Anthropic's format send words of the user in the message with the results."""
    sent = read_conversation([QUESTION, called("1"), result("rain"), QUESTION])
    for template, between in ((LISTED, "</s>[tools]a[INST]"), (THINKER, "[user]")):
        tokenizer = folder(tmp_path, template)
        chat = fitted(sent, described("x"), {}, tokenizer)
        prompt = tokenizer.decode(make_prompt(chat, 1, False, tokenizer, 4096)[0])
        assert re.search(rf"rain( \w{{9}})?{re.escape(between)}Rain\?", prompt)


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        ({"enable_thinking": True}, {"enable_thinking": True}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": 5, "reasoning_effort": 5}, {}),
        ({"reasoning_effort": "none", "enable_thinking": True}, {"enable_thinking": True, "reasoning_effort": "none"}),
    ],
)
def test_fields_set_the_variables_of_the_template(
    fields: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    assert read_options(fields) == options
    tokenizer = folder(tmp_path, THINKER)
    chat = fitted(read_conversation([QUESTION]), Tools(), read_options(fields), tokenizer)
    text = tokenizer.decode(make_prompt(chat, 1, False, tokenizer, 4096)[0])
    assert text.endswith("</think>\n\n") == (options.get("enable_thinking") is False)


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": 5}, {"chat_template_kwargs": {"messages": []}}, {"chat_template_kwargs": {"tools": 5}},
        {"enable_thinking": "yes"}, {"chat_template_kwargs": {"enable_thinking": 1}},
    ],
)  # fmt: skip
def test_variables_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        read_options(fields)
    assert caught.value.param


def test_thoughts_go_to_templates_that_know_their_marks_only(tmp_path: Path) -> None:
    sent = read_conversation([QUESTION, {"role": "assistant", "content": "Yes", "reasoning": "hm"}, QUESTION])
    assert fitted(sent, Tools(), {}, folder(tmp_path, THINKER)).messages[1].fields == {"reasoning_content": "hm"}
    own: Any = tiny_tokenizer()
    assert own.render_prompt(fitted(sent, Tools(), {"enable_thinking": False}, own))
