"""Your own conversations: every known layout is read, and a mistake is named with its place."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.data.conversation import Conversation, assistant, chat, system, user
from tasks.customjson import CustomJSON, read_record
from tasks.messages import read_messages
from tasks.preferences import read_pair
from tests.support.tiny_model import tiny_tokenizer

GOOD = [{"role": "user", "content": "你好"}, {"role": "assistant", "content": "你好！"}]


def test_own_conversations_in_both_shapes(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps(GOOD, ensure_ascii=False), "", json.dumps({"messages": GOOD, "id": 7}), "  "]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    task = CustomJSON(path)
    assert (len(task), task.name) == (2, "mine")
    assert task[0] == task[1] == read_messages(GOOD)
    assert task[0].messages[1].text == "你好！"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"{", "line 2: this is not JSON"),
        (b"\xff\xfe", "line 2: bytes that are not UTF-8"),
        (b"5", "a list of messages or an object, got int"),
        (b"{}", "it has the keys none"),
        (b'{"text": "a", "id": 3}', "it has the keys text, id"),
        (b'{"conversations": 5}', "a list of messages, got int"),
        (b'{"conversations": [{"from": "elf", "value": "a"}]}', "message 1 has \"from\" 'elf'; known are system"),
        (b'{"conversations": [{"from": ["gpt"], "value": "a"}]}', "message 1 has \"from\" ['gpt']; known are system"),
        (b'{"instruction": ["a"], "output": "b"}', '"instruction" and "input" must be texts'),
        (b'{"instruction": "a", "output": "b", "history": ["x"]}', '"history" must be a list of [question, answer]'),
        (b"[]", "needs a message of role 'assistant'"),
        (b'[{"role": "user", "content": "a"}]', "needs a message of role 'assistant'"),
        (b'[{"role": "user"}]', 'message 1 must be an object with "role" and "content"'),
        (b'["a"]', "message 1 must be an object"),
        (b'[{"role": "assistant", "content": "a"}]', "message 1 must have role 'user'"),
        (
            b'[{"role": "user", "content": "a"}, {"role": "system", "content": "a"}, {"role": "assistant", "content": "a"}]',
            "message 2 must have",
        ),
        (b'[{"role": "user", "content": 5}, {"role": "assistant", "content": "a"}]', "content of message 1"),
        (b'[{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]', "content of message 2"),
    ],
)
def test_own_conversations_are_refused_with_file_line_and_rule(tmp_path: Path, line: bytes, rule: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n")
    with pytest.raises(UserError) as refused:
        CustomJSON(path)
    assert str(path) in str(refused.value)
    assert "line 2" in str(refused.value)
    assert rule in str(refused.value)
    assert 'should look like {"messages": [{"role": "user", ' in str(refused.value)  # the form that docs/data.md shows


ASKED = [("user", "1+1?"), ("assistant", "2")]
LAYOUTS = {
    "messages": {"messages": [{"role": role, "content": text} for role, text in ASKED]},
    "roles under another key": {"conversations": [{"role": role, "content": text} for role, text in ASKED]},
    "ShareGPT": {"id": "x", "conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
    "Alpaca": {"instruction": "1+1?", "input": "", "output": "2"},
    "swift": {"query": "1+1?", "response": "2", "history": None},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_conversations_in_known_layouts_are_the_same(layout: str, tmp_path: Path) -> None:
    record, path = LAYOUTS[layout], tmp_path / "mine.json"
    for text in (
        json.dumps(record),
        json.dumps([record]),
        json.dumps([record], indent=2),
        "\ufeff" + json.dumps([record] * 2, indent=1),
    ):
        path.write_text(text, encoding="utf-8")
        assert CustomJSON(path)[0] == chat("1+1?", "2")


def test_system_words_history_and_input_are_turns() -> None:
    alpaca = {"instruction": "Add.", "input": "3 and 4", "output": "7", "system": "Be brief.", "history": [["a", "b"]]}
    assert read_record(alpaca) == Conversation(
        (system("Be brief."), user("a"), assistant("b"), user("Add.\n3 and 4"), assistant("7"))
    )
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert read_record({"conversations": turns}) == Conversation((system("Be brief."), user("a"), assistant("b")))


def test_a_mistake_in_a_list_over_several_lines_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('[\n {"instruction": "a", "output": "b"}\n {"instruction": "a"}\n]')
    with pytest.raises(UserError, match=r"mine.json, line 3: this is not JSON: a comma is missing"):
        CustomJSON(path)
    path.write_text('[\n {"instruction": "a", "output": "b"},\n {"instruction": "a"}\n]')
    with pytest.raises(UserError, match=r"mine.json, item 2: .* it has the keys instruction"):
        CustomJSON(path)


def test_a_missing_or_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no file"):
        CustomJSON(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no conversation"):
        CustomJSON(tmp_path / "empty.jsonl")


def turns(*messages: str, **last: Any) -> list[dict[str, Any]]:
    """Messages of user and assistant in turns; `last` holds more keys of the last one."""
    told = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(messages)]
    return [*told[:-1], {**told[-1], **last}]


TURNS = turns("Who are you?", "Pip!")
PIP = Conversation((system("You are Pip."), user("Who are you?"), assistant("Pip!")))


@pytest.mark.parametrize("name", ["messages", "conversations"])
def test_a_system_key_beside_messages_is_the_system_message(name: str) -> None:
    assert read_record({"system": "You are Pip.", name: TURNS}) == PIP
    assert read_record({"system": "", name: TURNS}) == chat("Who are you?", "Pip!")
    own = [{"role": "system", "content": "You are Pip."}, *TURNS]
    assert read_record({"system": "You are Pip.", name: own}) == PIP
    with pytest.raises(ValueError, match='"system"'):
        read_record({"system": "You are Rex.", name: own})


@pytest.mark.parametrize("switch", [{"weight": 0.0}, {"loss": False}, {"weight": 0, "loss": False}])
def test_an_answer_of_weight_0_or_without_loss_is_not_trained(switch: dict[str, Any]) -> None:
    messages = [*turns("Say it wrong", "WRONG", **switch), *turns("Now right", "right", weight=1, loss=True)]
    sharegpt = [
        {"from": "human", "value": "Say it wrong", "loss": None, "weight": 0},
        {"from": "gpt", "value": "WRONG", **switch},
        {"from": "human", "value": "Now right"},
        {"from": "gpt", "value": "right", "loss": True},
    ]
    tokenizer = tiny_tokenizer()
    for record in ({"messages": messages}, {"conversations": sharegpt}):
        rendered = tokenizer.render(read_record(record))
        trained = [token for token, mask in zip(rendered.ids, rendered.mask, strict=True) if mask]
        assert trained == [*tokenizer.encode("right"), tokenizer.special("assistant_end")]


@pytest.mark.parametrize(
    ("record", "key"),
    [
        ({"messages": turns("Say it", "it", weight=0.5)}, "weight"),
        ({"messages": turns("Say it", "it", loss="no")}, "loss"),
        ({"messages": turns("Say it", "it", weight=1, loss=False)}, "weight"),
        ({"messages": turns("Say it", "it", weight=0)}, "weight"),  # nothing would be trained
        ({"messages": [{**TURNS[0], "weight": 1}, TURNS[1]]}, "weight"),
        ({"messages": TURNS, "weight": 0.5}, "weight"),
        ({"messages": TURNS, "label": False}, "label"),
        (
            {
                "messages": [
                    TURNS[0],
                    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
                ]
            },
            "tool_calls",
        ),
        ({"conversations": TURNS, "tools": '[{"name": "get_time"}]'}, "tools"),
        ({"instruction": "2+2?", "output": "4", "context": "Use base 3."}, "context"),
        ({"messages": turns("2+2?", "4", reasoning_content="two and two make four")}, "reasoning_content"),
        ({"messages": TURNS, "system": "You are Rex.", "system_prompt": "You are Pip."}, "system_prompt"),
        ({"messages": TURNS, "loss": False}, "loss"),
        ({"messages": TURNS, "knowledge": ["Pip is a parrot."]}, "knowledge"),
        ({"messages": turns("2+2?", "4", train=False)}, "train"),
        (
            {"messages": turns("2+2?", "4", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])},
            "train_detail",
        ),
    ],
)
def test_a_key_that_cannot_be_honoured_is_refused_with_its_line(tmp_path: Path, record: Any, key: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps(record))
    with pytest.raises(UserError) as refused:
        CustomJSON(path)
    assert f"{path}, line 2: " in str(refused.value) and key in str(refused.value)


def test_notes_and_empty_keys_of_a_record_change_nothing() -> None:
    notes = {"id": 7, "source": "web", "score": 0.5, "toxic": False, "label": "greeting", "rejected_response": "no"}
    lists = {"metadata": {"lang": "en"}, "tags": ["a"]}
    empty = {"tools": "[]", "images": [], "reasoning": None, "weight": 1}
    messages = [TURNS[0], {**TURNS[1], "name": "Pip", "tool_calls": None, "reasoning_content": ""}]
    assert read_record({"conversations": messages, **notes, **lists, **empty}) == read_messages(TURNS)


def test_the_mark_of_an_image_is_refused_and_html_is_not() -> None:
    answer = {"role": "assistant", "content": "yes"}
    for text, refused in (
        ("<image>\nwhat?", True),
        ("what? <video>", True),
        ("What does the tag <audio> mean in HTML?", False),
        ("<video>\n<source src=a.mp4>\n</video>\nIs this right?", False),
    ):
        chat = {"messages": [{"role": "user", "content": text}, answer]}
        pair = {"prompt": text, "chosen": "yes", "rejected": "no"}
        for read, record in (
            (read_record, chat),
            (read_record, {"prompt": text, "response": "yes"}),
            (read_pair, pair),
        ):
            with pytest.raises(ValueError, match="reads no images") if refused else contextlib.nullcontext():
                read(record)
