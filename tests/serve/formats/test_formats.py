"""What models write, as whole texts and in pieces of every size: thoughts, words and calls."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from nanochat.data.conversation import Part
from nanochat.serve.formats.pieces import Arguments, Call, Piece, Thought, Words, add_piece
from nanochat.serve.formats.thoughts import Marks
from nanochat.serve.routes.reply import Form, Reply
from nanochat.serve.routes.tools import Tools

STRING, NUMBER = {"type": "string"}, {"type": "integer"}
WEATHER = {"type": "object", "properties": {"city": STRING, "days": NUMBER, "tags": {"type": "array"}}}
MAYBE = {
    "properties": {"a": {"type": ["string", "null"]}, "b": {"enum": [1, 2]}, "c": {"$ref": "#/x"}, "d": {"anyOf": 5}}
}
ZOD = {"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"a": NUMBER}}}}
TOOLS = Tools({"weather": WEATHER, "clock": {"type": "object"}, "maybe": MAYBE, "zod": ZOD})
THINK = Marks("<think>", "</think>")


def parsed(form: Form, texts: Sequence[str]) -> list[Piece]:
    """The pieces of a reply that arrives in these texts."""
    reply, pieces = Reply(form), []
    for i, text in enumerate(texts):
        for piece in reply.add([Part("text", text)], last=i == len(texts) - 1):
            add_piece(pieces, piece)
    return pieces


def everywhere(form: Form, text: str) -> list[Piece]:
    """The pieces of a reply, which must be the same wherever its text is cut."""
    whole = parsed(form, [text])
    for cut in range(1, len(text)):
        assert parsed(form, [text[:cut], text[cut:]]) == whole, text[:cut]
    for size in (1, 2, 3, 7):
        assert parsed(form, [text[i : i + size] for i in range(0, len(text), size)] or [""]) == whole
    return whole


def calls(pieces: Sequence[Piece]) -> list[Any]:
    """Words and thoughts of a reply as texts, and its calls as (name, arguments)."""
    told: list[Any] = []
    for piece in pieces:
        if isinstance(piece, Call):
            told.append((piece.name, ""))
        elif isinstance(piece, Arguments):
            told[-1] = (told[-1][0], told[-1][1] + piece.text)
        else:
            assert isinstance(piece, Words | Thought)
            told.append(piece.text)
    return told


T, W = Thought, Words


@pytest.mark.parametrize(
    ("opened", "text", "pieces"),
    [
        (False, "<think>\nhm\n</think>\n\nYes", [T("hm"), W("Yes")]),
        (False, "  <think>a</think>b", [T("a"), W("b")]),
        (False, "Yes", [W("Yes")]),
        (False, " Yes\n", [W(" Yes\n")]),
        (False, "", []),
        (False, "<th", [W("<th")]),
        (False, "<think>\n\n</think>\n\nYes", [W("Yes")]),
        (False, "<think>never closed", [T("never closed")]),
        (False, "<think>", []),
        (False, "<think>a\n\nb", [T("a\n\nb")]),
        (False, "<think>a </thi b</think>c", [T("a </thi b"), W("c")]),
        (False, "a <think>b</think> c", [W("a <think>b</think> c")]),
        (False, "a</think>b", [W("a</think>b")]),
        (False, "<think>a<think>b</think>c</think>d", [T("a<think>b"), W("c</think>d")]),
        (False, "<think>a</think>\n", [T("a")]),
        (True, "hm\n</think>\n\nYes", [T("hm"), W("Yes")]),
        (True, "<think>\nhm</think>Yes", [T("hm"), W("Yes")]),
        (True, "</think>\n\nYes", [W("Yes")]),
        (True, "\n</think>Yes", [W("Yes")]),
        (True, "cut off </th", [T("cut off </th")]),
        (True, "", []),
        (True, "a</think>b<think>c</think>", [T("a"), W("b<think>c</think>")]),
        (True, "北京</think>好", [T("北京"), W("好")]),
    ],
)
def test_thoughts_are_told_from_the_answer(opened: bool, text: str, pieces: list[Piece]) -> None:
    assert everywhere(Form(marks=THINK, opened=opened), text) == pieces


def test_models_without_thoughts_write_the_marks_as_text() -> None:
    assert everywhere(Form(), "<think>a</think>") == [Words("<think>a</think>")]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


DEEP = hermes("weather", f'{{"tags": {"[" * 101}{"]" * 101}}}')
PARIS = hermes("weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PARIS, [("weather", '{"city": "Paris"}')]),
        (f"Let me see.\n{PARIS}\n{PARIS}\n", ["Let me see.\n", *[("weather", '{"city": "Paris"}')] * 2]),
        (f"{PARIS}\nDone", [("weather", '{"city": "Paris"}'), "\nDone"]),
        (f"\n\n{PARIS}", [("weather", '{"city": "Paris"}')]),
        (f"a < b <tool {PARIS}", ["a < b <tool ", ("weather", '{"city": "Paris"}')]),
        (hermes("clock", "{}"), [("clock", "{}")]),
        (hermes("clock", "{ }"), [("clock", "{}")]),
        ('<tool_call>{"name":"weather","arguments":{"city":"a","days":3,"tags":["x",{"y":[1]}]}}</tool_call>',
         [("weather", '{"city": "a", "days": 3, "tags": ["x", {"y": [1]}]}')]),
        (hermes("weather", r'{"city": "a \"}],{[ \\", "days": 1}'), [("weather", r'{"city": "a \"}],{[ \\", "days": 1}')]),
        (hermes("weather", '{"city": "</tool_call>"}'), [("weather", '{"city": "</tool_call>"}')]),
        (hermes("weather", '{"city": "a\nb"}'), [("weather", r'{"city": "a\nb"}')]),
        (hermes("weather", r'{"city": "\u5317\u4eac"}'), [("weather", '{"city": "北京"}')]),
        (hermes("weather", '{"a": 1,}'), [("weather", '{"a": 1}')]),
        ('<tool_call>{"arguments": {"city": "a"}, "name": "weather"}</tool_call>', [("weather", '{"city": "a"}')]),
        ('<tool_call>{"name": "weather", "parameters": {"city": "a"}}</tool_call>', [("weather", '{"city": "a"}')]),
        # Cut off: the arguments stay open, so that nobody takes them for whole.
        ('<tool_call>{"name": "weather", "arguments": {"city": "Pa', [("weather", '{"city": "Pa')]),
        ('<tool_call>{"name": "weather", "arguments": {"days": 1, "city": "Pa', [("weather", '{"days": 1, "city": "Pa')]),
        # Without the closing mark, a whole call is a call.
        ('<tool_call>{"name": "weather", "arguments": {"days": 1}}', [("weather", '{"days": 1}')]),
        ('<tool_call>{"name": "weather", "arguments": {"days": 1}} and', [("weather", '{"days": 1}'), " and"]),
        ('<tool_call>{"name": "weather", "arguments": {"days": 1}', [("weather", '{"days": 1}')]),
        # What no JSON of an answer can hold: halves of surrogate pairs, NaN, and 100 lists in each other.
        (hermes("weather", r'{"city": "\ud83d\ude00\ud83d", "\udc00": 1}'),
         [("weather", '{"city": "😀\ufffd", "\ufffd": 1}')]),
        ('<tool_call>{"arguments": {"city": "\\ud800"}, "name": "weather"}</tool_call>', [("weather", '{"city": "\ufffd"}')]),
        (hermes("weather", '{"days": NaN}'), [hermes("weather", '{"days": NaN}')]),
        (hermes("weather", '{"days": 1, "tags": [-Infinity]}'), [("weather", '{"days": 1, "tags": [-Infinity]}}\n')]),
        (hermes("weather", '{"days": 1e999}'), [hermes("weather", '{"days": 1e999}')]),
        (DEEP, [DEEP]),
        # Broken after the first argument: what the model wrote is passed on.
        (hermes("weather", '{"days": 1, bad}'), [("weather", '{"days": 1, bad}}\n')]),
        # What is no call stays text, and a call after it is still one.
        ("<tool_call>", ["<tool_call>"]),
        ("</tool_call>", ["</tool_call>"]),
        ("<tool_call>no json</tool_call>", ["<tool_call>no json</tool_call>"]),
        ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
        ("<tool_call>{" + '"a":' * 9 + "</tool_call>", ["<tool_call>{" + '"a":' * 9 + "</tool_call>"]),
        (hermes("other", '{"a": 1}'), [hermes("other", '{"a": 1}')]),
        (hermes("weather", "{bad}"), [hermes("weather", "{bad}")]),
        (hermes("weather", "5"), [hermes("weather", "5")]),
        ('<tool_call>{"name": "weather"}</tool_call>', ['<tool_call>{"name": "weather"}</tool_call>']),
        (f"<tool_call>{PARIS}", ["<tool_call>", ("weather", '{"city": "Paris"}')]),
        (f"<tool_call>x</tool_call>{PARIS}", ["<tool_call>x</tool_call>", ("weather", '{"city": "Paris"}')]),
        (" ", [" "]),
    ],
)  # fmt: skip
def test_calls_in_json(text: str, told: list[Any]) -> None:
    assert calls(everywhere(Form(TOOLS, "json"), text)) == told


def xml(name: str, **arguments: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (xml("weather", city="Paris", days="3"), [("weather", '{"city": "Paris", "days": 3}')]),
        (f"So:\n{xml('clock')}\n{xml('weather', city='a')}", ["So:\n", ("clock", "{}"), ("weather", '{"city": "a"}')]),
        (xml("weather", city="3"), [("weather", '{"city": "3"}')]),
        (xml("weather", city="a\n\n b <i>\"</i>\\"), [("weather", json.dumps({"city": "a\n\n b <i>\"</i>\\"}))]),
        (xml("weather", tags='["x", {"y": null}]', days="many"), [("weather", '{"tags": ["x", {"y": null}], "days": "many"}')]),
        (xml("maybe", a="null", b="2", c="[1]", d="x"), [("maybe", '{"a": null, "b": 2, "c": [1], "d": "x"}')]),
        (xml("maybe", a="5", b="True"), [("maybe", '{"a": "5", "b": true}')]),
        (xml("clock", zone="5"), [("clock", '{"zone": "5"}')]),
        (xml("zod", a="5"), [("zod", '{"a": 5}')]),
        ("<tool_call><function=weather><parameter=city>a</parameter></function></tool_call>", [("weather", '{"city": "a"}')]),
        (xml("weather", tags=r'["\ud800"]', days="NaN"), [("weather", '{"tags": ["\ufffd"], "days": "NaN"}')]),
        (xml("weather", days="-Infinity", tags="[1e999]"), [("weather", '{"days": "-Infinity", "tags": "[1e999]"}')]),
        # Without the mark around it, and without closing tags.
        ("<function=weather>\n<parameter=city>\na\n</parameter>\n</function>", [("weather", '{"city": "a"}')]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\na\n<parameter=days>\n1\n</function>\n</tool_call>",
         [("weather", '{"city": "a", "days": 1}')]),
        (f"{xml('clock')} then", [("clock", "{}"), " then"]),
        # Cut off.
        ("<tool_call>\n<function=weather>\n<parameter=city>\na\n</parameter>\n<parameter=da", [("weather", '{"city": "a"')]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nPa", [("weather", "{")]),
        ("<tool_call>\n<function=wea", ["<tool_call>\n<function=wea"]),
        # No call.
        (xml("other", a="1"), [xml("other", a="1")]),
        ("<tool_call>no</tool_call>", ["<tool_call>no</tool_call>"]),
        ("<tool_call><function=weather>no</function>", ["<tool_call><function=weather>no</function>"]),
        (f"<tool_call><function={xml('clock')}", ["<tool_call><function=", ("clock", "{}")]),
        ("a <function b", ["a <function b"]),
    ],
)  # fmt: skip
def test_calls_in_xml(text: str, told: list[Any]) -> None:
    assert calls(everywhere(Form(TOOLS, "xml"), text)) == told


ITEM = '{"name": "weather", "arguments": {"city": "Paris"}, "id": "abcdefgh1"}'
LIST = f"[TOOL_CALLS] [{ITEM}]"
NAMED = '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}'
PARIS_CALL = ("weather", '{"city": "Paris"}')


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (LIST, [PARIS_CALL]),
        (f"So: [TOOL_CALLS][{ITEM}, {ITEM}] then", ["So: ", PARIS_CALL, PARIS_CALL, " then"]),
        ('[TOOL_CALLS] [ { "name" : "clock","arguments":{ } } ]', [("clock", "{}")]),
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"tags": [{"a": "}]"}], "city": "[\\"]"}}]',
         [("weather", '{"tags": [{"a": "}]"}], "city": "[\\"]"}')]),
        (NAMED, [PARIS_CALL]),
        (f'{NAMED}[TOOL_CALLS] clock[CALL_ID]abcdefgh1[ARGS]{{}}', [PARIS_CALL, ("clock", "{}")]),
        # Cut off.
        ('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Pa', [("weather", '{"city": "Pa')]),
        (f"[TOOL_CALLS][{ITEM[:-1]}", [PARIS_CALL]),
        (f"[TOOL_CALLS][{ITEM}", [PARIS_CALL]),
        (f"[TOOL_CALLS][{ITEM}, ", [PARIS_CALL]),
        (f"[TOOL_CALLS][{ITEM} and", [PARIS_CALL, "and"]),
        (f'[TOOL_CALLS][{ITEM}, {{"name": "wea', [PARIS_CALL, ', {"name": "wea']),
        ('[TOOL_CALLS]weather[ARGS]{"days": 1, bad}', [("weather", '{"days": 1, bad}')]),
        # No call.
        ("[TOOL_CALLS]", ["[TOOL_CALLS]"]),
        ("[TOOL_CALLS] [1]", ["[TOOL_CALLS] [1]"]),
        ("[TOOL_CALLS]weather is fine", ["[TOOL_CALLS]weather is fine"]),
        (LIST.replace("weather", "other"), [LIST.replace("weather", "other")]),
        (NAMED.replace("weather", "other"), [NAMED.replace("weather", "other")]),
        (f'[TOOL_CALLS][{ITEM}, {{"name": "other", "arguments": {{}}}}]',
         [PARIS_CALL, ', {"name": "other", "arguments": {}}]']),
        (f"[TOOL_CALLS][TOOL_CALLS][{ITEM}]", ["[TOOL_CALLS]", PARIS_CALL]),
    ],
)  # fmt: skip
def test_calls_in_lists(text: str, told: list[Any]) -> None:
    pieces = everywhere(Form(TOOLS, "list"), text)
    assert calls(pieces) == told == calls(everywhere(Form(TOOLS, "args"), text))
    ids = [piece.id for piece in pieces if isinstance(piece, Call)]
    assert all(re.fullmatch("[a-z0-9]{9}", call_id) for call_id in ids) and len(set(ids)) == len(ids)


BARE = '{"name": "weather", "parameters": {"city": "Paris"}}'
OTHER = BARE.replace("weather", "other")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BARE, [PARIS_CALL]),
        (f"\n\n{BARE}\n", [PARIS_CALL]),
        (f"<|python_tag|>{BARE}", [PARIS_CALL]),
        (f"So: <|python_tag|> {BARE}", ["So: ", PARIS_CALL]),
        (BARE.replace("parameters", "arguments"), [PARIS_CALL]),
        ('{"type": "function", "name": "clock", "parameters": { } }', [("clock", "{}")]),
        ('{"name": "clock", "parameters": {}, "type": "function"}', [("clock", "{}")]),
        ('{"name":"weather","parameters":{"tags":[{"a":"}}; {"}],"city":"\\"};"}}',
         [("weather", '{"tags": [{"a": "}}; {"}], "city": "\\"};"}')]),
        *[(f"{BARE}{between}{BARE}", [PARIS_CALL] * 2) for between in ("; ", ";", "\n", ", ", "<|python_tag|>")],
        (f"{BARE}\nDone", [PARIS_CALL, "\nDone"]),
        (f"{BARE}; so", [PARIS_CALL, "; so"]),
        # Cut off.
        (BARE[:-4], [("weather", '{"city": "Pari')]),
        (BARE[:-1], [PARIS_CALL]),
        (f"{BARE}; ", [PARIS_CALL]),
        (f'{BARE}; {{"name": "wea', [PARIS_CALL, '; {"name": "wea']),
        ('{"name": "weather", "parameters": {"days": 1, bad}}', [("weather", '{"days": 1, bad}}')]),
        # No call.
        *[(text, [text]) for text in (
            " {", '{"name": "Ann", "parameters": 5}', '{"name": "weather"}', '{"a": {"b": 1}}', f"[{BARE}]", f"So: {BARE}",
            OTHER, f"<|python_tag|>{OTHER}", "<|python_tag|>import os", "<|python_tag|>",
            '{"name": "weather", "parameters": {bad}}',
        )],
        (f"{BARE}; {OTHER}", [PARIS_CALL, f"; {OTHER}"]),
    ],
)  # fmt: skip
def test_calls_without_marks(text: str, told: list[Any]) -> None:
    assert calls(everywhere(Form(TOOLS, "bare"), text)) == told


def test_json_that_begins_as_no_call_does_is_passed_on_at_once() -> None:
    assert Reply(Form(TOOLS, "bare")).add([Part("text", '{"c')]) == [Words('{"c')]
    assert Reply(Form(TOOLS, "bare")).add([Part("text", f'{{"name": "{"x" * 300}')]) != []


@pytest.mark.parametrize(
    ("form", "call"),
    [("json", PARIS), ("xml", xml("weather", city="Paris")), ("list", LIST), ("args", NAMED), ("bare", BARE)],
)
def test_calls_follow_a_thought_in_which_calls_are_thoughts(form: str, call: str) -> None:
    pieces = everywhere(Form(TOOLS, form, THINK), f"<think>\nI call {call}.\n</think>\n\n{call}")
    assert calls(pieces) == [f"I call {call}.", ("weather", '{"city": "Paris"}')]


def test_words_after_the_mark_of_calls_are_passed_on_before_the_reply_ends() -> None:
    assert Reply(Form(TOOLS, "list")).add([Part("text", f"[TOOL_CALLS]{'猫' * 65}")]) == [
        Words(f"[TOOL_CALLS]{'猫' * 65}")
    ]


def test_a_reply_that_may_have_one_call_ends_with_it() -> None:
    one = replace(TOOLS, parallel=False)
    assert calls(everywhere(Form(one), f"{PARIS}{PARIS} x")) == [PARIS_CALL]
    assert calls(everywhere(Form(one, "bare"), f"{BARE}; {BARE} x")) == [PARIS_CALL]


def test_an_argument_is_passed_on_when_it_is_whole() -> None:
    reply = Reply(Form(TOOLS, "json"))
    head = PARIS.partition("Paris")[0]
    assert reply.add([Part("text", f'{head}Paris", "days": 1')]) == [Call("weather"), Arguments('{"city": "Paris"')]
    assert reply.add([Part("text", ", ")]) == [Arguments(', "days": 1')]


def test_tokens_of_the_thought_are_counted_with_its_marks() -> None:
    reply = Reply(Form(marks=THINK))
    for text in ("<think>", "\n", "a", " b", "\n", "</think>", "\n\n", "Yes"):
        reply.add([Part("text", text)])
    assert (reply.thought_tokens, reply.thought, reply.text) == (6, "a b", "Yes")
