"""/v1/completions with a real model: prompts of every form, echo, log-probabilities, streams, and what is refused."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from tests.support.served import Served, serving

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def greedy(served: Served, prompt: list[int], **fields: Any) -> Any:
    """The engine's own reply."""
    return served.alone.generate([prompt], Sampling(0.0, None, **{"max_tokens": 8, **fields}))[0]


def said(served: Served, tokens: list[int]) -> str:
    return "".join(part.text for part in reply_parts(tokens, served.tokenizer))


def test_texts_and_tokens_alone_and_in_batches_get_the_engines_replies(served):
    tokenizer = served.tokenizer
    texts = ["the cat", "猫坐在", "12 + 34"]
    prompts = [[tokenizer.bos, *tokenizer.encode(text)] for text in texts]
    expected = [said(served, greedy(served, prompt).tokens) for prompt in prompts]
    settings = {"temperature": 0, "max_tokens": 8}
    for given in (texts, prompts):
        body = served.ok(PATH, prompt=given, **settings)
        assert [choice["text"] for choice in body["choices"]] == expected
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))
        assert [served.ok(PATH, prompt=one, **settings)["choices"][0]["text"] for one in given] == expected
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    bare = served.ok(PATH, prompt="the cat", add_special_tokens=False, **settings)
    assert bare["choices"][0]["text"] == said(served, greedy(served, prompts[0][1:]).tokens)


def test_echo_scores_every_token_of_prompt_and_reply(served):
    prompt = [served.tokenizer.bos, *served.tokenizer.encode("the cat 猫 sat on the mat")]
    own = greedy(served, prompt, logprobs=2, prompt_logprobs=2)
    choice = served.ok(PATH, prompt=prompt, echo=True, logprobs=2, max_tokens=8, temperature=0)["choices"][0]
    assert choice["text"] == "the cat 猫 sat on the mat" + said(served, own.tokens)
    found = choice["logprobs"]
    assert len({len(column) for column in found.values()}) == 1
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    expected = [scored.logprob for scored in own.prompt_scores] + own.logprobs
    assert found["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    for logprob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert logprob <= max(top.values()) and 2 <= len(top) <= 3
    starts = [*found["text_offset"], len(choice["text"])]
    for token, start, end in zip(found["tokens"], starts[:-1], starts[1:], strict=True):
        if not token.startswith(("bytes:", "<|", "\ufffd")):
            assert choice["text"][start:end].endswith(token)  # half a character before it shows here


def test_prompt_alone_can_be_scored(served):
    prompt = [served.tokenizer.bos, *served.tokenizer.encode("the cat")]
    body = served.ok(PATH, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    assert body["choices"][0]["text"] == "the cat" and body["usage"]["completion_tokens"] == 0
    assert len(body["choices"][0]["logprobs"]["tokens"]) == len(prompt)
    own = greedy(served, prompt, prompt_logprobs=3)
    ranked = served.ok(PATH, prompt=prompt, prompt_logprobs=3, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert ranked[0] is None and len(ranked) == len(prompt)
    for entry, scored in zip(ranked[1:], own.prompt_scores, strict=True):
        assert entry[str(scored.token)]["logprob"] == pytest.approx(scored.logprob, abs=1e-5)
        assert [value["rank"] for value in entry.values() if value["rank"]].count(1) == 1


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(5, 1), (5, 0), (1, 3)])
def test_echo_and_prompt_logprobs_each_list_as_many_tokens_as_asked(served, logprobs, prompt_logprobs):
    fields = {"prompt": "the cat sat", "echo": True, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    choice = served.ok(PATH, **fields, max_tokens=1)["choices"][0]
    ranks = [{entry["rank"] for entry in tokens.values()} - {None} for tokens in choice["prompt_logprobs"][1:]]
    assert ranks == [{*range(1, prompt_logprobs + 1)}] * len(ranks)
    assert {len(top) - logprobs for top in choice["logprobs"]["top_logprobs"][1:]} <= {0, 1}


def test_several_replies_differ_and_the_same_seed_gives_them_again(served):
    fields = {"prompt": ["the cat", "12"], "n": 3, "seed": 5, "temperature": 1.0, "max_tokens": 12}
    bodies = [served.ok(PATH, **fields) for _ in range(2)]
    texts = [[choice["text"] for choice in body["choices"]] for body in bodies]
    assert texts[0] == texts[1] and len(set(texts[0])) > 3
    assert [choice["index"] for choice in bodies[0]["choices"]] == [*range(6)]
    assert served.ok(PATH, **{**fields, "prompt": "the cat", "n": 1})["choices"][0]["text"] == texts[0][0]


def test_stream_is_the_same_text_in_pieces(served):
    fields = {
        "prompt": ["the cat", "猫坐"], "temperature": 0, "max_tokens": 20, "echo": True, "logprobs": 1,
    }  # fmt: skip
    whole = served.ok(PATH, **fields)
    response = served.post(PATH, **fields, stream=True, stream_options={"include_usage": True})
    lines = [line for line in response.text.split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert chunks.pop()["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": {"cached_tokens": pytest.approx(8, abs=8)},
    }
    for choice in whole["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine if piece["finish_reason"]] == [choice["finish_reason"]]
        logprobs = [value for piece in mine if piece["logprobs"] for value in piece["logprobs"]["token_logprobs"]]
        assert logprobs[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-5)


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
def test_a_stream_of_several_replies_ends_with_one_usage(served, options):
    fields = {"prompt": ["the cat", "12"], "n": 2, "max_tokens": 5, "ignore_eos": True, "stream_options": options}
    lines = [line for line in served.post(PATH, **fields, stream=True).text.split("\n\n") if line][:-1]
    streamed = [json.loads(line.removeprefix("data: ")) for line in lines]
    (usage,) = [chunk["usage"] for chunk in streamed if chunk.get("usage")]
    assert usage["completion_tokens"] == 20 and streamed[-1].get("usage") == usage


def test_stop_strings_end_the_text_and_its_scores(served):
    tokens = range(served.tokenizer.vocab_size)
    bias = {str(token): -100 for token in tokens if not served.tokenizer.decode_bytes([token]).isascii()}
    fields = {"prompt": "the cat", "temperature": 0, "max_tokens": 20, "logprobs": 0, "logit_bias": bias}
    free = served.ok(PATH, **fields)["choices"][0]
    stop = free["text"][3:5]
    choice = served.ok(PATH, **fields, stop=[stop])["choices"][0]
    assert choice["text"] == free["text"][: free["text"].index(stop)] and choice["finish_reason"] == "stop"
    assert max(choice["logprobs"]["text_offset"]) < len(choice["text"])


def test_log_probabilities_are_finite_numbers_in_json(served):
    bias = {str(token): -100 for token in range(served.tokenizer.vocab_size - 20)}
    choice = served.ok(PATH, prompt="x", logit_bias=bias, logprobs=20, max_tokens=4)["choices"][0]
    values = [*choice["logprobs"]["token_logprobs"], *choice["logprobs"]["top_logprobs"][0].values()]
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "prompt", "missing_required_parameter"),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "empty_prompt"),
        ({"prompt": [[290]]}, "prompt[0]", "invalid_value"),
        ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
        ({"prompt": [10**400]}, "prompt[0]", "invalid_value"),
        ({"prompt": [True]}, "prompt[0]", "invalid_value"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt", "invalid_value"),
        ({"prompt": "x", "logprobs": 10**9}, "logprobs", "invalid_value"),
        ({"prompt": "x", "prompt_logprobs": 10**9}, "prompt_logprobs", "invalid_value"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "x", "best_of": 3}, "best_of", "unsupported_parameter"),
        ({"prompt": [5] * 160, "max_tokens": 1}, "prompt", "context_length_exceeded"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(served, fields, param, code):
    error = served.refused(PATH, **fields)
    assert (error["param"], error["code"]) == (param, code)
