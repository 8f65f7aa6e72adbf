"""Pairs of answers: every known layout is read alike, and a mistake is named with its place."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, assistant, system, user
from tasks.mixtures import own_conversations, own_pairs
from tasks.preferences import Pair, read_pair, read_pairs
from tests.support.tiny_model import tiny_tokenizer

YES, NO = {"role": "assistant", "content": "yes"}, {"role": "assistant", "content": "no"}
ASKED, BEFORE = {"role": "user", "content": "is it?"}, {"role": "user", "content": "hello"}
WISH = {"role": "system", "content": "be short"}


def pair(*before: Any) -> Pair:
    """The two answers yes and no after some turns."""
    first, second = (Conversation((*before, assistant(word)), prompt_turns=len(before)) for word in ("yes", "no"))
    return first, second


ALONE = pair(user("is it?"))
LATER = pair(system("be short"), user("hello"), assistant("hi"), user("is it?"))
HISTORY = [BEFORE, {"role": "assistant", "content": "hi"}]
LAYOUTS: dict[str, tuple[dict[str, Any], Pair]] = {
    "TRL, texts": ({"prompt": "is it?", "chosen": "yes", "rejected": "no"}, ALONE),
    "TRL, messages": ({"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, ALONE),
    "TRL, messages of several turns": ({"prompt": [WISH, *HISTORY, ASKED], "chosen": [YES], "rejected": [NO]}, LATER),
    "TRL, messages that begin alike": ({"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, ALONE),
    "TRL, texts that begin alike": ({"chosen": "is it? yes", "rejected": "is it? no"}, ALONE),
    "UltraFeedback": ({"prompt": "is it?", "chosen": [ASKED, YES], "rejected": [ASKED, NO], "messages": []}, ALONE),
    "HH-RLHF": (
        {"chosen": "\n\nHuman: is it?\n\nAssistant: yes", "rejected": "\n\nHuman: is it?\n\nAssistant: no"}, ALONE,
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"},
                           {"from": "human", "value": "is it?"}],
         "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}, "system": "be short"},
        LATER,
    ),
    "Alpaca": (
        {"instruction": "is", "input": "it?", "chosen": "yes", "rejected": "no"}, pair(user("is\nit?")),
    ),
    "Alpaca with a history": (
        {"instruction": "is it?", "history": [["hello", "hi"]], "system": "be short",
         "chosen": "yes", "rejected": "no"},
        LATER,
    ),
    "Orca": ({"system": "", "question": "is it?", "chosen": "yes", "rejected": "no"}, ALONE),
    "a question with its input and a history": (
        {"question": "is", "input": "it?", "history": [["hello", "hi"]], "chosen": "yes", "rejected": "no"},
        pair(user("hello"), assistant("hi"), user("is\nit?")),
    ),
    "an input alone": ({"input": "is it?", "chosen": "yes", "rejected": "no"}, ALONE),
    "a table of several layouts": (
        {"prompt": None, "conversations": None, "instruction": None, "question": "is it?", "chosen": "yes", "rejected": "no"},
        ALONE,
    ),
    "ms-swift": ({"messages": [ASKED, YES], "rejected_response": "no"}, ALONE),
    "ms-swift with a system key": (
        {"messages": [*HISTORY, ASKED, YES], "rejected_response": "no", "system": "be short"}, LATER,
    ),
    "TRL with a system key that the prompt repeats": (
        {"prompt": [WISH, *HISTORY, ASKED], "chosen": [YES], "rejected": [NO], "system": "be short"}, LATER,
    ),
    "ms-swift, objects of a question and its answer": (
        {"messages": [{"system": "be short", "human": "hello", "assistant": "hi"}, {"human": "is it?", "assistant": "yes"}],
         "rejected_response": "no"},
        LATER,
    ),
    "objects in a prompt": (
        {"prompt": [{"user": "hello", "assistant": "hi"}, ASKED], "system": "be short", "chosen": [YES], "rejected": "no"},
        LATER,
    ),
    "whole conversations as objects": (
        {"prompt": "is it?", "chosen": [{"human": "is it?", "bot": "yes"}], "rejected": {"human": "is it?", "bot": "no"}},
        ALONE,
    ),
    "ms-swift, messages": ({"messages": [ASKED, YES], "rejected_messages": [ASKED, NO]}, ALONE),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_pair(layout: str) -> None:
    value, wanted = LAYOUTS[layout]
    assert read_pair(value) == wanted


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ([], "a pair of answers is an object, got list"),
        ({"prompt": [WISH, ASKED], "chosen": [YES], "rejected": [NO], "system": "be long"}, '"system"'),
        ({"messages": [WISH, ASKED, YES], "rejected_response": "no", "system": "be long"}, '"system"'),
        ({"prompt": [ASKED], "chosen": [{**YES, "weight": 0}], "rejected": [NO]}, "weight"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["cat.png"]}, "images"),
        (
            {"prompt": "a", "chosen": [{"role": ["assistant"], "content": "b"}], "rejected": "c"},
            "chosen: message 1 has \"role\" ['assistant']; known are system",
        ),
        ({"prompt": "a", "chosen": "b"}, 'needs the keys "chosen" and "rejected"; it has the keys prompt, chosen'),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected: the content of message 2 must be a text"),
        ({"prompt": "a", "chosen": 5, "rejected": "b"}, "a conversation is a list of messages, got int"),
        ({"prompt": [NO], "chosen": [YES], "rejected": [NO]}, "must answer the same question of the user"),
        ({"chosen": "yes", "rejected": "no"}, 'there is no "prompt", and chosen and rejected do not begin'),
        ({"chosen": [ASKED, YES], "rejected": [BEFORE, NO]}, "must answer the same question"),
        ({"messages": [ASKED, YES], "rejected_response": None}, "a conversation is a list of messages, got NoneType"),
        ({"prompt": "a", "history": [["b", "c"]], "chosen": "d", "rejected": "e"}, '"history" (earlier questions'),
        ({"prompt": "a", "input": "b", "chosen": "c", "rejected": "d"}, '"input" (more of the question'),
        ({"prompt": "a", "conversations": [ASKED], "chosen": "c", "rejected": "d"}, '"conversations" (the messages)'),
        (
            {"conversations": [ASKED], "instruction": "a", "chosen": "c", "rejected": "d"},
            '"instruction" (the question)',
        ),
        ({"instruction": "a", "question": "b", "chosen": "c", "rejected": "d"}, '"question" (the question)'),
        (
            {"messages": [ASKED, YES], "rejected_response": "no", "rejected_messages": [ASKED, NO]},
            '"rejected_response"',
        ),
        ({"conversations": [{"from": "x", "value": ""}], "chosen": "a", "rejected": "b"}, "message 1 has \"from\" 'x'"),
    ],
)
def test_a_record_that_is_no_pair_is_refused_with_file_line_and_rule(tmp_path: Path, value: Any, rule: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(LAYOUTS["TRL, texts"][0]) + "\n" + json.dumps(value))
    with pytest.raises(UserError) as refused:
        read_pairs(str(path))
    text = str(refused.value)
    assert f"{path}, line 2: " in text and rule in text and '{"prompt": "...", "chosen"' in text


def test_both_answers_of_a_pair_are_held_out_and_files_have_weights(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"q{i}", "chosen": "a", "rejected": "b"}) for i in range(120)))
    mix = own_pairs([str(path)])
    asked = [one.messages[0].text for one in mix.val()]
    assert asked == [f"q{i}" for i in range(9, 120, 10) for _ in "ab"]  # few pairs: one in ten
    train = list(mix.train())
    assert len(train) == 2 * 108 and [one.messages[1].text for one in train[:4]] == ["a", "b", "a", "b"]
    twice = own_pairs([f"{path}:2"])
    assert [one.messages[0].text for one in twice.val()] == ["q49", "q49", "q99", "q99"], "none twice"
    train = list(twice.train())
    assert len(train) == 2 * 2 * 118 and not set(train) & set(twice.val()) and twice.key != mix.key
    assert [one.messages[1].text for one in train[:4]] == ["a", "b", "a", "b"]
    single = tmp_path / "single.jsonl"
    single.write_text(json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"}))
    with pytest.raises(UserError, match="must hold at least 2 pairs that differ, since one is for validation, got 1"):
        own_pairs([str(single)])
    both = tmp_path / "both.jsonl"  # the same file may hold conversations too, which are kept under another name
    asks = [{"role": "user", "content": word} for word in ("so?", "is it?")]
    both.write_text("\n".join(json.dumps({"messages": [ask, YES], "rejected_response": "no"}) for ask in asks))
    assert own_pairs([str(both)]).key != own_conversations([str(both)]).key


@pytest.mark.parametrize("layout", ["TRL, texts", "ShareGPT"])  # without and with a system turn, which joins the next
def test_our_own_tokenizer_trains_the_answers_alone(layout: str) -> None:
    tokenizer = tiny_tokenizer()
    for one in read_pair(LAYOUTS[layout][0]):
        rendered = tokenizer.render(one)
        assert rendered.ids == tokenizer.render(Conversation(one.messages)).ids
        trained = [token for token, mask in zip(rendered.ids, rendered.mask, strict=True) if mask]
        assert trained == [*tokenizer.encode(one.messages[-1].text), tokenizer.special("assistant_end")]


def test_pairs_with_equal_answers_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.jsonl"
    equal = {"prompt": "is it?", "chosen": "yes", "rejected": "yes"}
    path.write_text("\n".join(json.dumps(one) for one in (LAYOUTS["TRL, texts"][0], equal, equal)))
    assert read_pairs(str(path)) == [ALONE]
    assert "2 pairs with equal answers" in capsys.readouterr().err
    path.write_text(json.dumps(equal))
    with pytest.raises(UserError, match="all 1 pairs"):
        read_pairs(str(path))


def test_bad_pairs_may_be_left_out_and_tools_are_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with_tools = {**LAYOUTS["TRL, texts"][0], "tools": [{"name": "get_time"}]}
    path.write_text(f'{{"prompt": \n{json.dumps(with_tools)}\n')
    (pair_read,) = read_pairs(str(path), skip_bad_lines=True)
    assert [one.options["tools"][0]["function"]["name"] for one in pair_read] == ["get_time"] * 2
