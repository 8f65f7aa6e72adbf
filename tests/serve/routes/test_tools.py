"""A client's tools: what the model reads of them, and which parts of its text go back as calls."""

import json
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import pytest
from pydantic import BaseModel, Field

from nanochat.common import UserError
from nanochat.generate.schema.grammar import Schemas
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.tools import Tools, read_tools
from tests.support.tiny_model import tiny_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "北京"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def tools(choice: object = "auto") -> Tools:
    return read_tools({"tools": [WEATHER, CLOCK], "tool_choice": choice})


def test_model_reads_of_the_tools_it_may_call():
    assert "The weather of a city" in tools().instructions
    assert tools("none") == read_tools({}) == Tools()
    assert tools("required").forced == ("weather", "clock")
    assert tools({"type": "function", "function": {"name": "clock"}}).forced == ("clock",)


@pytest.mark.parametrize(
    "tool",
    [5, {}, {"type": 5}, {"type": "a\nb"}, {"type": "function"}, {"type": "function", "function": {"name": "a b"}},
     {"type": "function", "function": {"name": "x" * 65}},
     {"type": "function", "function": {"name": "x", "parameters": 5}}],
)  # fmt: skip
def test_what_is_no_function_is_refused(tool):
    with pytest.raises(ApiError, match=r"tools\[0\]"):
        read_tools({"tools": [tool]})


def test_tools_of_other_types_are_skipped_and_named():
    others = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "web_search"}]
    beside = read_tools({"tools": [*others, WEATHER, {"type": "custom", "name": "x"}]})
    assert beside == replace(read_tools({"tools": [WEATHER]}), skipped=("web_search", "mcp", "custom"))
    assert beside.headers == {"X-Skipped-Tools": "web_search, mcp, custom"}
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert read_tools({"tools": others, **choice}) == Tools(skipped=("web_search", "mcp"))
    for choice in ("required", {"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}):
        with pytest.raises(ApiError, match="tool_choice"):
            read_tools({"tools": others, "tool_choice": choice})


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("mode", "forced"), [("auto", ()), ("required", ("clock",))])
def test_allowed_tools_are_the_only_ones(nested, mode, forced):
    allowed = {"mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    choice = {"type": "allowed_tools", **({"allowed_tools": allowed} if nested else allowed)}
    chosen = tools(choice)
    assert (tuple(chosen.parameters), chosen.forced) == (("clock",), forced)
    assert "clock" in chosen.instructions and "weather" not in chosen.instructions
    for wrong in ({**allowed, "mode": "x"}, {**allowed, "tools": 5}, {**allowed, "tools": [{"name": "x"}]}, 5):
        with pytest.raises(ApiError, match="tool_choice"):
            tools({"type": "allowed_tools", "allowed_tools": wrong})


def test_a_call_of_no_tool_cannot_be_required() -> None:
    allowed = {"type": "allowed_tools", "tools": []}
    assert tools({**allowed, "mode": "auto"}).parameters == {}
    with pytest.raises(ApiError, match="needs tools") as caught:
        tools({**allowed, "mode": "required"})
    assert caught.value.param == "tool_choice"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(BaseModel, extra="forbid"):
    x: int = Field(ge=0, le=9)


class Shape(BaseModel, extra="forbid"):
    colour: Colour
    centre: Point


class Tree(BaseModel):
    value: int
    children: list["Tree"]


def accepts(schema: str, **call: Any) -> bool:
    """Whether a reply that must meet a schema can be this call."""
    tokenizer = tiny_tokenizer()
    grammar, end = Schemas(tokenizer).grammar(schema), tokenizer.special("assistant_end")
    for token in (*tokenizer.encode(json.dumps(call, separators=(",", ":"))), end):
        if not grammar.allowed()[token // 8] >> token % 8 & 1:
            return False
        grammar.accept(token)
    return True


def forced(*parameters: Mapping[str, Any]) -> str:
    """The schema of a reply that must call one of the functions f0, f1, ... with these parameters."""
    functions = [{"name": f"f{i}", "parameters": each} for i, each in enumerate(parameters)]
    offered = [{"type": "function", "function": function} for function in functions]
    read = read_tools({"tools": offered, "tool_choice": "required"})
    return read.call_schema(read.forced)


SHAPE = {"colour": "red", "centre": {"x": 3}}
TREE = {"value": 1, "children": [{"value": 2, "children": []}]}
DRAFT7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        (Shape.model_json_schema(), SHAPE, {**SHAPE, "colour": "green"}),
        (Tree.model_json_schema(), TREE, {**TREE, "children": [5]}),
        ({**DRAFT7, **Shape.model_json_schema()}, SHAPE, {**SHAPE, "colour": "green"}),
    ],
    ids=["enum", "recursive", "draft-07"],
)
def test_parameters_refer_to_their_own_definitions(parameters: Any, good: Any, bad: Any) -> None:
    """test_constraints.py has the other kinds of references, as both formats of calls write them."""
    for schema in (forced(parameters), forced(parameters, {"type": "object"})):
        assert accepts(schema, name="f0", arguments=good)
        assert not accepts(schema, name="f0", arguments=bad)


@pytest.mark.parametrize("own", [{}, {"$id": "http://a/b"}, {"$id": "#a"}])
def test_definitions_of_one_name_belong_to_their_own_function(own: dict[str, str]) -> None:
    both = [{**own, "$ref": "#/$defs/A", "$defs": {"A": {"enum": [i]}}} for i in range(2)]
    assert accepts(forced(*both), name="f0", arguments=0)
    assert accepts(forced(*both), name="f1", arguments=1)
    assert not accepts(forced(*both), name="f1", arguments=0)


def test_a_reference_to_an_address_that_two_functions_have_is_refused() -> None:
    shared = {"$id": "http://a/b", "$ref": "http://a/b#/$defs/A", "$defs": {"A": {"enum": [5]}}}
    with pytest.raises(UserError, match="http://a/b"):
        accepts(forced(shared, {**shared, "$defs": {"A": {"enum": [6]}}}), name="f0", arguments=5)
