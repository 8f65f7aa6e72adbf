"""Replies that must be calls, or think no longer than they may: what the grammar lets a model write."""

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from nanochat.generate.sampling import Sampling
from nanochat.generate.schema.grammar import Schemas
from nanochat.serve.formats.thoughts import Marks
from nanochat.serve.routes.constraints import constrained
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.reply import Form
from nanochat.serve.routes.tools import Tools, read_tools
from tests.support.fake_engine import CHAT, ByteTokenizer, FakeEngine, ask, running
from tests.support.tiny_model import tiny_tokenizer

THINK = Marks("<think>", "</think>")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "spot": {"$ref": "#/$defs/Spot"},
        "code": {"type": "string", "maxLength": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"Spot": {"type": "array", "items": {"type": "integer"}}},
}


def tools(**fields: Any) -> Tools:
    functions = [{"name": "weather", "parameters": PARAMETERS}, {"name": "clock", "parameters": {"type": "object"}}]
    offered = [{"type": "function", "function": function} for function in functions]
    return read_tools({"tools": offered, "tool_choice": "required", **fields})


def grammar(form: Form, schema: str | None = None, max_thought: int | None = None) -> str | None:
    ((_, sampling),) = constrained([([1], Sampling(schema=schema))], form, max_thought)
    return sampling.schema


def refused_at(text: str, *asked_for: Any) -> int | None:
    """The first token of a reply that the grammar refuses, or None if it takes the whole reply."""
    schema = grammar(*asked_for)
    assert schema is not None
    tokenizer = tiny_tokenizer()
    follows, end = Schemas(tokenizer).grammar(schema), tokenizer.special("assistant_end")
    for number, token in enumerate((*tokenizer.encode(text), end)):
        if not follows.allowed()[token // 8] >> token % 8 & 1:
            return number
        follows.accept(token)
    return None


def xml(name: str, **arguments: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


def hermes(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def listed(name: str, **arguments: Any) -> str:
    return f"[TOOL_CALLS] [{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}]"


def named(name: str, **arguments: Any) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]abcdefgh1[ARGS]{json.dumps(arguments, ensure_ascii=False)}"


def bare(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments}, ensure_ascii=False)


FORMS = [("json", hermes), ("xml", xml), ("list", listed), ("args", named), ("bare", bare)]
# What stands between two calls with a line break between them, and what the model writes there.
BETWEEN = {"json": ("", ""), "xml": ("", ""), "list": ("]\n[TOOL_CALLS] [", ", "), "args": ("\n[", "[")}


@pytest.mark.parametrize(("calls", "call"), FORMS)
def test_a_forced_call_is_one_of_the_functions_with_arguments_of_its_schema(calls: str, call: Any) -> None:
    form = Form(tools(), calls)
    digit, spot = ("3", "[1, 2]") if calls == "xml" else (3, [1, 2])
    assert refused_at(call("weather", city="Paris", unit="C", days=digit, spot=spot, code="ab"), form) is None
    assert refused_at(call("weather", city='北京\n"quoted" <b>'), form) is None
    for wrong in ({"unit": "C"}, {"city": "a", "unit": "K"}, {"city": "a", "days": digit * 10}, {"city": "a", "spot": "x"},
                  {"city": "a", "code": "abc"}):  # fmt: skip
        assert refused_at(call("weather", **wrong), form) is not None, wrong
    assert refused_at(call("clock"), form) is None
    assert refused_at("It is late.", form) == 0
    assert refused_at(call("other"), form) is not None
    assert refused_at(call("clock"), Form(tools(tool_choice={"function": {"name": "weather"}}), calls)) is not None


@pytest.mark.parametrize(
    ("calls", "mark"),
    [("json", "<tool_call>"), ("xml", "<tool_call>"), ("list", "[TOOL_CALLS]"), ("args", "[TOOL_CALLS]")],
)
def test_a_call_begins_with_the_special_token_of_its_mark(calls: str, mark: str) -> None:
    """The letters of Mistral's mark would be other tokens, which its models never write."""
    tokenizer = tiny_tokenizer()
    token = tokenizer.special("user_start")
    schema = grammar(Form(tools(), calls, specials={mark: token}))
    allowed = Schemas(tokenizer).grammar(schema or "").allowed()
    assert int.from_bytes(allowed, "little") == 1 << token


FIVE = {"enum": [5]}
# name -> a function's parameters, and an argument `a` that they allow; (6) is none
REFERENCES: dict[str, tuple[dict[str, Any], Any]] = {
    "another argument": ({"properties": {"b": FIVE, "a": {"$ref": "#/properties/b"}}}, 5),
    "its own definitions": ({"properties": {"a": {"$ref": "#/properties/a/$defs/A", "$defs": {"A": FIVE}}}}, 5),
    "a whole address": ({"$id": "x:y", "properties": {"a": {"$ref": "x:y#/$defs/A"}}, "$defs": {"A": FIVE}}, 5),
    "an anchor": ({"properties": {"a": {"$ref": "#here"}}, "$defs": {"A": {"$anchor": "here", **FIVE}}}, 5),
    "itself": ({"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}, {"a": None}),
    "at the top, as zod writes it": ({"$ref": "#/definitions/A", "definitions": {"A": {"properties": {"a": FIVE}}}}, 5),
    "no reference": (
        {"properties": {"a": {"properties": {"$ref": FIVE, "b": {"const": {"$ref": "#/x"}}}, "type": "object"}}},
        {"$ref": 5, "b": {"$ref": "#/x"}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFERENCES)
@pytest.mark.parametrize(("calls", "call"), FORMS)
def test_references_mean_in_one_argument_what_they_mean_in_the_function(case: str, calls: str, call: Any) -> None:
    parameters, good = REFERENCES[case]
    form = Form(tools(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}]), calls)
    good, bad = (json.dumps(good), "6") if calls == "xml" else (good, 6)
    assert refused_at(call("f", a=good), form) is None
    assert refused_at(call("f", a=bad), form) is not None


def test_many_references_to_a_large_schema_are_refused_before_they_are_copied() -> None:
    properties = {f"a{i}": {"$ref": "#/$defs/D0"} for i in range(100)}
    parameters = {"properties": properties, "$defs": {f"D{i}": {"enum": [i, "x" * 90]} for i in range(100)}}
    offered = tools(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    with pytest.raises(ApiError, match="too large for so many references"):
        grammar(Form(offered, "xml"))
    parameters["properties"] = {f"a{i}": {"type": "integer"} for i in range(100)}
    assert len(grammar(Form(offered, "xml")) or "") < 30_000


@pytest.mark.parametrize(("calls", "call"), FORMS[:-1])
def test_several_calls_are_written_where_the_client_says_so(calls: str, call: Any) -> None:
    two = f"{call('clock')}\n{call('weather', city='a')}".replace(*BETWEEN[calls])
    assert refused_at(two, Form(tools(parallel_tool_calls=True), calls)) is None
    for said in ({}, {"parallel_tool_calls": False}):
        assert refused_at(two, Form(tools(**said), calls)) is not None


def test_a_model_that_was_trained_to_write_one_call_is_forced_to_write_one() -> None:
    form = Form(tools(parallel_tool_calls=True), "bare")
    assert refused_at(bare("clock"), form) is None
    for more in (f"; {bare('clock')}", f"\n{bare('clock')}", " Done"):
        assert refused_at(bare("clock") + more, form) is not None


@pytest.mark.parametrize(("calls", "call"), FORMS)
def test_a_forced_call_follows_the_thought(calls: str, call: Any) -> None:
    thinks = Form(tools(), calls, THINK)
    assert refused_at(f"<think>\nhm < </th\n</think>\n\n{call('clock')}", thinks) is None
    assert refused_at(call("clock"), thinks) is None
    assert refused_at(f"hm</think>\n\n{call('clock')}", replace(thinks, opened=True)) is None
    assert refused_at(call("clock"), replace(thinks, opened=True)) is not None  # still in the thought
    assert refused_at(call("clock"), replace(thinks, closed=True)) is None
    assert refused_at(f"<think>a</think>\n\n{call('clock')}", replace(thinks, closed=True)) is not None


@pytest.mark.parametrize(("calls", "call"), FORMS)
def test_a_schema_is_one_of_the_text_where_the_model_may_call_instead(calls: str, call: Any) -> None:
    schema, may = json.dumps({"enum": [5]}), tools(tool_choice="auto")
    for form, before in ((Form(may, calls), ""), (Form(may, calls, THINK, opened=True), "hm</think>\n\n")):
        assert refused_at(f"{before}5", form, schema) is refused_at(f"{before}{call('clock')}", form, schema) is None
        for wrong in ("6", "Hello", call("weather", city="a", unit="K"), call("clock") + "5"):
            assert refused_at(before + wrong, form, schema) is not None
    assert refused_at("5", Form(tools(), calls), schema) == 0  # a call that must come needs no other form


def test_a_schema_is_one_of_the_answer_and_not_of_the_thought() -> None:
    schema = json.dumps({"enum": [5]})
    assert grammar(Form(), schema) == schema
    assert refused_at("hm</think>\n\n5", Form(marks=THINK, opened=True), schema) is None
    assert refused_at("5", Form(marks=THINK), schema) is None
    assert refused_at("5", Form(marks=THINK, closed=True), schema) is None
    assert refused_at("6", Form(marks=THINK), schema) is not None


def test_a_thought_is_closed_when_it_has_its_tokens() -> None:
    opened = Form(marks=THINK, opened=True)
    tokenizer = tiny_tokenizer()
    thought = "one two three four five six seven eight nine"
    length = len(tokenizer.encode(thought))
    for form, begin in ((opened, ""), (Form(marks=THINK), "<think>")):
        assert refused_at(f"{begin}{thought}</think>\n\nYes", form, None, 50) is None
        refused = refused_at(f"{begin}{thought}</think>\n\nYes", form, None, 4)
        assert refused is not None and refused - len(tokenizer.encode(begin)) in (4, 5)
    assert length > 6
    assert refused_at("</think>\n\nYes", opened, None, 0) is None
    assert refused_at("a</think>\n\nYes", opened, None, 0) == 0
    assert refused_at("<think></think>\n\nYes</think>", Form(marks=THINK), None, 0) is None


@pytest.mark.parametrize("thought", ["one two three four five six seven", "🦉🦉🦉🦉"])
def test_the_model_can_write_nothing_but_the_closing_mark_when_the_thought_has_its_tokens(thought: str) -> None:
    """The grammar ended the thought without the mark, so that the answer belonged to the thought."""
    for form, begin in ((Form(marks=THINK, opened=True), ""), (Form(marks=THINK), "<think>")):
        schema, tokenizer = grammar(form, '{"enum": [5]}', 3), tiny_tokenizer()
        follows, written = Schemas(tokenizer).grammar(schema or ""), list[int]()
        wanted = iter(tokenizer.encode(begin + thought))
        while (token := next(wanted, None)) is not None and follows.allowed()[token // 8] >> token % 8 & 1:
            follows.accept(token)
            written.append(token)
        for _ in range(40):
            first = next(token for token in range(400) if follows.allowed()[token // 8] >> token % 8 & 1)
            if first in tokenizer.stops:
                break
            follows.accept(first)
            written.append(first)
        text = tokenizer.decode(written)
        assert text.startswith(begin) and text.endswith("\n</think>\n\n5"), text
        assert "�" not in text


def test_replies_that_nothing_constrains_have_no_grammar() -> None:
    assert grammar(Form()) is grammar(Form(marks=THINK)) is grammar(Form(marks=THINK, opened=True)) is None
    assert grammar(Form(), None, 5) is grammar(Form(marks=THINK, closed=True), None, 5) is None


def test_an_argument_whose_name_cannot_be_written_is_refused() -> None:
    function = {"name": "a", "parameters": {"type": "object", "properties": {"a>b": {}}}}
    wrong = read_tools({"tools": [{"type": "function", "function": function}], "tool_choice": "required"})
    with pytest.raises(ApiError) as caught:
        grammar(Form(wrong, "xml"))
    assert caught.value.param == "tools"


CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CONSTRAINTS = [
    {"tools": [CLOCK], "tool_choice": "required"}, {"max_reasoning_tokens": 5}, {"response_format": {"type": "json_object"}},
]  # fmt: skip


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda fields: [*fields][-1])
def test_a_reply_that_must_not_end_with_its_value_is_refused(constraint: dict[str, Any]) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer(thought_marks=THINK, call_format="json"))
    with running(engine) as url:
        for longer in ({"ignore_eos": True}, {"min_tokens": 3}):
            answer = httpx.post(url + CHAT, json=ask("hello", **constraint, **longer))
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value"), answer.text
            assert "ignore_eos and min_tokens" in answer.json()["error"]["message"]
