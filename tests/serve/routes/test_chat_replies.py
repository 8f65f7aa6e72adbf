"""/v1/chat/completions with a real model: several replies, log-probabilities, schemas, cached tokens, refusals."""

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nanochat.data.conversation import Conversation, user
from nanochat.generate.sampling import Sampling
from nanochat.generate.schema import grammar
from tests.support.served import Served, serving
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

PATH = "/v1/chat/completions"
CAT = [{"role": "user", "content": "the cat sat on the mat"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(length=300) as one:
        yield one


def chunks(served: Served, **fields: Any) -> list[Any]:
    lines = [line for line in served.post(PATH, stream=True, **fields).text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_log_probabilities_are_the_engines_and_spell_the_content(served):
    prompt = served.tokenizer.render_prompt(Conversation((user(CAT[0]["content"]),)))
    own = served.alone.generate([prompt], Sampling(0.0, None, 20, logprobs=3))[0]
    fields = {"messages": CAT, "temperature": 0, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    choice = served.ok(PATH, **fields)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace") == choice["message"]["content"]
    assert {len(entry["top_logprobs"]) for entry in entries} == {3}
    assert [entry["logprob"] for entry in entries] == pytest.approx(own.logprobs[: len(entries)], abs=1e-5)
    streamed = [chunk["choices"][0] for chunk in chunks(served, **fields)]
    pieces = [entry for piece in streamed if piece["logprobs"] for entry in piece["logprobs"]["content"]]
    assert [entry["token"] for entry in pieces] == [entry["token"] for entry in entries]
    assert served.ok(PATH, messages=CAT)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_a_stream_of_several_replies_ends_with_one_usage(served, options):
    streamed = chunks(served, messages=CAT, n=3, max_tokens=5, ignore_eos=True, stream_options=options)
    (usage,) = [chunk["usage"] for chunk in streamed if chunk.get("usage")]
    assert usage["completion_tokens"] == 15 and streamed[-1].get("usage") == usage


def test_a_model_of_nan_answers_with_an_error() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_gpt(tokenizer.vocab_size)
    with torch.no_grad():
        model.h[0].mlp.c_fc.weight.fill_(math.nan)
    with serving(loaded=(model, tokenizer)) as broken:
        whole = broken.refused(PATH, 500, messages=CAT)
        (*_, last) = chunks(broken, messages=CAT)
        assert whole["code"] == "model_broken" and last["error"] == whole
        broken.refused(PATH, 500, messages=CAT, n=2, logprobs=True)
        broken.refused("/v1/completions", 500, prompt="the cat")


def test_next_turn_reads_only_what_is_new(served):
    question = [{"role": "user", "content": CAT[0]["content"] * 3}]  # a few tokens are not worth a copy
    first = served.ok(PATH, messages=question, max_tokens=10, temperature=0)
    said = first["choices"][0]["message"]
    if not said["content"].strip():
        said = {"role": "assistant", "content": "x"}
    second = served.ok(PATH, messages=[*question, said, *CAT], max_tokens=1)["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["prompt_tokens"] - 1


def test_schema_that_cannot_be_met_is_refused_before_a_stream_begins(served):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}
    error = served.refused(PATH, messages=CAT, response_format=wanted, stream=True)
    assert error["code"] == "invalid_request" and "schema" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_its_schema_cannot_finish_is_an_error(served, stream, monkeypatch):
    schema = {"type": "string", "description": f"hostile {stream}"}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    monkeypatch.setattr(grammar, "REPLY_SECONDS", -1000.0)
    if stream:
        last = [*chunks(served, messages=CAT, response_format=wanted, max_tokens=100)][-1]
        assert last["error"]["code"] == "schema_too_complex"
    else:
        error = served.refused(PATH, messages=CAT, response_format=wanted, max_tokens=100)
        assert error["code"] == "schema_too_complex" and "pattern" in error["message"]
    error = served.refused(PATH, messages=CAT, response_format=wanted, stream=stream)
    assert error["code"] == "invalid_request" and "pattern" in error["message"]  # it is remembered


def test_others_are_answered_while_a_schema_asks_for_hours_of_work(served):
    """The automaton of the schema has 99,999,989 states. Its trial ends after 2 s."""
    wanted = {"type": "json_schema", "json_schema": {"schema": {"type": "integer", "multipleOf": 99_999_989}}}
    served.ok(PATH, messages=CAT, max_tokens=1, response_format={"type": "json_object"})
    answered = 0
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(served.refused, PATH, messages=CAT, response_format=wanted)
        while not slow.done():
            served.ok("/tokenize", prompt="the cat")
            served.ok(PATH, messages=CAT, max_tokens=1, response_format={"type": "json_object"})
            answered += 1
    assert answered > 4  # not one after the other
    assert "cannot be prepared in 1 s" in slow.result()["message"]
