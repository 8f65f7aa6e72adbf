"""continue_final_message: a chat whose last message is the beginning of the reply."""

from collections.abc import Iterator

import pytest

from nanochat.data.conversation import Conversation, user
from nanochat.generate.sampling import Sampling
from tests.support.served import Served, serving

PATH = "/v1/chat/completions"
CAT = {"role": "user", "content": "the cat sat on the mat"}
BEGUN = {"role": "assistant", "content": "the dog"}
CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
CALLED = {**BEGUN, "tool_calls": [CALL]}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(length=300) as one:
        yield one


def test_a_reply_continues_where_it_was_cut(served):
    tokenizer = served.tokenizer
    prompt = [*tokenizer.render_prompt(Conversation((user(CAT["content"]),))), *tokenizer.encode("the dog")]
    own = served.alone.generate([prompt], Sampling(0.0, None, 8))[0]
    fields = {"messages": [CAT, BEGUN], "continue_final_message": True, "temperature": 0, "max_tokens": 8}
    body = served.ok(PATH, **fields)
    assert body["usage"]["prompt_tokens"] == len(prompt)
    said = tokenizer.decode([token for token in own.tokens if token < tokenizer.special("assistant_end")])
    assert said.startswith(body["choices"][0]["message"]["content"])


def test_calculator_calls_of_the_beginning_keep_their_marks(served):
    parts = [{"type": "text", "text": "2+3 is "}, {"type": "tool", "expression": "2+3", "result": "5"}]
    marks = ("python_start", "python_end", "output_start", "output_end")
    tokens = 4 + sum(len(served.tokenizer.encode(text)) for text in ("2+3 is ", "2+3", "5"))
    assert all(served.tokenizer.special(mark) for mark in marks)
    base = served.ok(PATH, messages=[CAT], max_tokens=1)["usage"]["prompt_tokens"]
    messages = [CAT, {"role": "assistant", "parts": parts}]
    body = served.ok(PATH, messages=messages, continue_final_message=True, max_tokens=1)
    assert body["usage"]["prompt_tokens"] == base + tokens


def test_the_oldest_messages_make_room_for_the_beginning(served):
    messages = [CAT, {"role": "assistant", "content": "yes"}] * 10
    fields = {"messages": [*messages, CAT, BEGUN], "continue_final_message": True, "truncation": "auto"}
    body = served.ok(PATH, **fields, max_tokens=200)
    assert body["truncated_messages"] > 0 and body["truncated_messages"] % 2 == 0
    assert body["usage"]["prompt_tokens"] <= 100


def test_the_flags_of_transformers_and_vllm_continue_a_reply(served):
    fields = {"messages": [CAT, BEGUN], "continue_final_message": True, "temperature": 0, "max_tokens": 4}
    both = served.ok(PATH, **fields, add_generation_prompt=False)
    assert both["choices"] == served.ok(PATH, **fields)["choices"]
    asked = {"messages": [CAT], "temperature": 0, "max_tokens": 4}
    assert served.ok(PATH, **asked, add_generation_prompt=True)["choices"] == served.ok(PATH, **asked)["choices"]


def test_replies_in_a_row_are_continued_as_one(served):
    pieces = [{"role": "assistant", "content": text} for text in ("yes", "the dog")]
    one = {"role": "assistant", "content": "yes\n\nthe dog"}
    fields = {"continue_final_message": True, "temperature": 0, "max_tokens": 4}
    found = served.ok(PATH, messages=[CAT, *pieces], **fields)
    assert found["choices"] == served.ok(PATH, messages=[CAT, one], **fields)["choices"]


def test_a_reply_after_the_results_of_calls_is_continued(served):
    messages = [CAT, CALLED, {"role": "tool", "tool_call_id": "1", "content": "yes"}, BEGUN]
    served.ok(PATH, messages=messages, continue_final_message=True, max_tokens=4)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": [CAT], "continue_final_message": True}, "continue_final_message needs a reply to continue"),
        ({"messages": [CAT, BEGUN], "add_generation_prompt": False}, "add_generation_prompt"),
        (
            {"messages": [CAT, BEGUN], "continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ({"messages": [CAT, BEGUN], "continue_final_message": 1}, "must be true or false"),
        ({"messages": [CAT, CALLED], "continue_final_message": True}, "a reply with calls cannot be continued"),
        ({"messages": [CAT, CALLED, BEGUN], "continue_final_message": True}, "a reply with calls cannot be continued"),
    ],
)
def test_what_cannot_be_continued_is_refused(served, fields, reason):
    response = served.post(PATH, **fields)
    assert response.status_code == 400 and reason in response.json()["error"]["message"]
