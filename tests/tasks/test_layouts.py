"""The layouts in which people have their conversations: each is read as its tool means it, or refused by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError
from nanochat.data.sources.listing import name_of
from tasks.customjson import CustomJSON
from tasks.mixtures import own_conversations
from tasks.record_keys import MESSAGE, RECORD, VERSIONS

LEMON = [{"role": "user", "content": "What colour is a lemon?"}, {"role": "assistant", "content": "Yellow."}]
YELLOW = ["user: What colour is a lemon?", "assistant: Yellow."]
SUM = ["user: 2+2?", "assistant: 4"]
WRONG_RIGHT = ["user: Say it wrong", "(assistant: WRONG)", "user: Now right", "assistant: right"]
PIP = ["system: You are Pip.", "user: Who are you?", "assistant: Pip!"]
TOOL = {"name": "get_time", "parameters": {"type": "object"}}


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def said(name: str, value: str, **more: Any) -> dict[str, Any]:
    return {"from": name, "value": value, **more}


# name -> record, what is read of it, and whether our own chat format takes it; (...) is not trained
READ: dict[str, tuple[Any, list[str], bool]] = {
    "messages": ({"messages": LEMON}, YELLOW, True),
    "a list of messages": (LEMON, YELLOW, True),
    "Alpaca with empty keys": (
        {"instruction": "2+2?", "input": "", "output": "4", "system": None, "history": []}, SUM, True,
    ),
    "Alpaca": ({"instruction": "Who are", "input": "you?", "output": "Pip!", "system": "You are Pip.", "text": "..."},
               ["system: You are Pip.", "user: Who are\nyou?", "assistant: Pip!"], True),
    "content parts": (
        {"messages": [message("user", [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]),
                      message("assistant", [{"type": "text", "text": "4"}])]}, SUM, True,
    ),
    "developer": (
        {"messages": [message("developer", "Be brief."), message("user", "2+2?"), message("assistant", "4")]},
        ["system: Be brief.", *SUM], True,
    ),
    "gpt first": ({"conversations": [said("gpt", "Hello."), said("human", "2+2?"), said("gpt", "4")]},
                  ["assistant: Hello.", *SUM], False),
    "human last": ({"conversations": [said("human", "2+2?"), said("gpt", "4"), said("human", "thanks")]},
                   [*SUM, "user: thanks"], True),
    "input and output": ({"input": "2+2?", "output": "4"}, SUM, True),
    "instruction and response (Dolly)": (
        {"instruction": "2+2?", "context": "", "response": "4", "category": "open_qa"}, SUM, True,
    ),
    "upper case (OASST)": ({"INSTRUCTION": "2+2?", "RESPONSE": "4", "SOURCE": None}, SUM, True),
    "question and answer": ({"question": "2+2?", "answer": "4"}, SUM, True),
    "question with an input": ({"question": "Who are", "input": "you?", "answer": "Pip!"},
                               ["user: Who are\nyou?", "assistant: Pip!"], True),
    "OpenOrca": ({"id": "x", "system_prompt": "You are Pip.", "question": "Who are you?", "response": "Pip!"}, PIP, True),
    "prompt and response": ({"prompt": "2+2?", "response": "4"}, SUM, True),
    "prompt and completion": ({"prompt": "2+2?", "completion": " 4"}, SUM, True),
    "prompt and completion with a good label": ({"prompt": "2+2?", "completion": " 4", "label": True}, SUM, True),
    "prompt and completion of messages": (
        {"prompt": [message("user", "a"), message("assistant", "b"), message("user", "2+2?")],
         "completion": [message("assistant", "4")]},
        ["user: a", "(assistant: b)", *SUM], True,
    ),
    "a prompt of swift's questions with their answers": (
        {"prompt": [{"human": "a", "assistant": "b"}, {"user": "c", "bot": "d"}, message("user", "2+2?")],
         "completion": [message("assistant", "4")]},
        ["user: a", "(assistant: b)", "user: c", "(assistant: d)", *SUM], True,
    ),
    "system beside swift's questions with their answers": (
        {"system": "You are Pip.", "messages": [{"system": "You are Pip.", "human": "Who are you?", "assistant": "Pip!"}]},
        PIP, True,
    ),
    "swift query with a history": (
        {"system": "Be kind.", "query": "And of grass?", "response": "Green.",
         "history": [["What colour is a lemon?", "Yellow."]]},
        ["system: Be kind.", *YELLOW, "user: And of grass?", "assistant: Green."], True,
    ),
    "swift questions with their answers": (
        {"conversation": [{"human": "2+2?", "assistant": "4"}], "conversation_id": 1, "category": "x"}, SUM, True,
    ),
    "XTuner": ({"conversation": [{"system": "You are Pip.", "input": "Who are you?", "output": "Pip!"}]}, PIP, True),
    "user and assistant in from": ({"conversations": [said("user", "2+2?"), said("assistant", "4")]}, SUM, True),
    "role and value": ({"conversations": [{"role": "user", "value": "2+2?"}, {"role": "bot", "value": "4"}]}, SUM, True),
    "weight 0": (
        {"messages": [message("user", "Say it wrong"), message("assistant", "WRONG", weight=0),
                      message("user", "Now right"), message("assistant", "right", weight=1)]}, WRONG_RIGHT, True,
    ),
    "loss null": (
        {"conversations": [said("human", "Say it wrong", loss=None), said("gpt", "WRONG", loss=False),
                           said("human", "Now right"), said("gpt", "right", loss=True)]}, WRONG_RIGHT, True,
    ),
    "train false (Axolotl)": (
        {"messages": [message("user", "Say it wrong", train=False), message("assistant", "WRONG", train=False),
                      message("user", "Now right"), message("assistant", "right", train=True)]}, WRONG_RIGHT, True,
    ),
    "loss_weight (LLaMA-Factory)": (
        {"messages": [message("user", "Say it wrong", loss_weight=0.0), message("assistant", "WRONG", loss_weight=0.0),
                      message("user", "Now right"), message("assistant", "right", loss_weight=1.0)]}, WRONG_RIGHT, True,
    ),
    "system beside messages": (
        {"system": "You are Pip.", "messages": [message("user", "Who are you?"), message("assistant", "Pip!")]}, PIP, True,
    ),
    "system in the middle": (
        {"messages": [message("user", "2+2?"), message("system", "Be brief."), message("assistant", "4")]},
        ["user: 2+2?", "system: Be brief.", "assistant: 4"], False,
    ),
    "two users": (
        {"messages": [message("user", "hi"), message("user", "2+2?"), message("assistant", "4")]}, ["user: hi", *SUM], False,
    ),
    "tools beside messages": (
        {"tools": [TOOL], "messages": [message("user", "Time?"), message("assistant", "<tool_call>...</tool_call>")]},
        ["user: Time?", "assistant: <tool_call>...</tool_call>"], False,
    ),
    "OpenAI's calls": (
        {"tools": [{"type": "function", "function": TOOL}], "functions": [TOOL], "parallel_tool_calls": False,
         "messages": [message("user", "Time?"),
                      message("assistant", None, tool_calls=[
                          {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{\"city\": 1}"}}]),
                      message("tool", "12:05", tool_call_id="1"), message("assistant", "12:05.")]},
        ["user: Time?", 'assistant:  get_time{"city": 1}', "tool: 12:05", "assistant: 12:05."], False,
    ),
    "OpenAI's old calls": (
        {"functions": [TOOL],
         "messages": [message("user", "Time?"),
                      message("assistant", None, function_call={"name": "get_time", "arguments": "{}"}),
                      message("function", "12:05", name="get_time"), message("assistant", "12:05.")]},
        ["user: Time?", "assistant:  get_time{}", "tool: 12:05", "assistant: 12:05."], False,
    ),
    "ShareGPT's calls": (
        {"tools": json.dumps([TOOL]),
         "conversations": [said("human", "Time?"),
                           said("function_call", '{"name": "get_time", "arguments": {"city": 1}}'),
                           said("observation", "12:05"), said("gpt", "12:05.")]},
        ["user: Time?", 'assistant:  get_time{"city": 1}', "tool: 12:05", "assistant: 12:05."], False,
    ),
    "swift's calls": (
        {"tools": [json.dumps(TOOL)],
         "messages": [message("user", "Time?"),
                      message("tool_call", '{"name": "get_time", "arguments": {"city": 1}}', loss=False),
                      message("tool_response", "12:05"), message("assistant", "12:05.")]},
        ["user: Time?", '(assistant:  get_time{"city": 1})', "tool: 12:05", "assistant: 12:05."], False,
    ),
    "reasoning": (
        {"messages": [message("user", "2+2?"), message("assistant", "4", reasoning_content="two and two")]},
        ["user: 2+2?", "assistant: 4 two and two"], False,
    ),
    "reasoning of a call": (
        {"messages": [message("user", "Time?"),
                      message("tool_call", '{"name": "get_time"}', thinking="the clock", reasoning="the clock"),
                      message("tool_response", "12:05"), message("assistant", "12:05.")]},
        ["user: Time?", "assistant:  get_time{} the clock", "tool: 12:05", "assistant: 12:05."], False,
    ),
    "new and old names that agree": (
        {"messages": [{"role": "user", "from": "human", "content": "Time?", "value": "Time?"},
                      message("assistant", None, function_call={"name": "get_time"}, tool_calls=[
                          {"id": "1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]),
                      message("tool", "12:05"), message("assistant", "12:05.", tool_calls="null")]},
        ["user: Time?", "assistant:  get_time{}", "tool: 12:05", "assistant: 12:05."], False,
    ),
    "template variables": (
        {"messages": [message("user", "2+2?"), message("assistant", "4")], "chat_template_kwargs": {"enable_thinking": False}},
        SUM, False,
    ),
    "UltraChat": ({"prompt": "What colour is a lemon?", "messages": LEMON, "prompt_id": "1"}, YELLOW, True),
    "pairs of ms-swift": ({"messages": LEMON, "rejected_response": "Red."}, YELLOW, True),
}  # fmt: skip


def told(conversation: Any) -> list[str]:
    """A line for each turn, in brackets if it is not trained."""
    lines = []
    for turn in conversation.messages:
        words = [f"{turn.role}: {turn.text}"]
        for call in turn.fields.get("tool_calls", ()):
            words.append(call["function"]["name"] + json.dumps(call["function"]["arguments"]))
        words += [turn.fields[key] for key in ("reasoning_content",) if key in turn.fields]
        line = " ".join(words)
        lines.append(line if turn.trained else f"({line})")
    return lines


@pytest.mark.parametrize("layout", READ)
def test_a_layout_is_read_as_its_tool_means_it(layout: str, tmp_path: Path) -> None:
    record, turns, own = READ[layout]
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps(record)}\n")
    assert told(CustomJSON(path, own_format=False)[0]) == turns
    if own:
        assert told(CustomJSON(path)[0]) == turns
    else:
        with pytest.raises(UserError, match="line 1"):
            CustomJSON(path)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [LEMON[0], message("assistant", "")]}, "message 2 must be a text that is not empty"),
        ({"messages": LEMON, "images": ["cat.png"]}, '"images"'),
        ({"messages": [message("user", [{"type": "image_url"}]), LEMON[1]]}, "image_url"),
        ({"messages": LEMON, "label": False}, '"label"'),
        ({"messages": LEMON, "label": 0}, '"label"'),
        ({"messages": LEMON, "train": False}, '"train"'),
        ({"messages": LEMON, "persona": "Pip"}, '"persona" is unknown'),
        ({"messages": LEMON, "sytem": "You are Pip."}, "known are system"),
        ({"messages": LEMON, "answer": "Red."}, '"answer" .* not read in this layout'),
        ({"messages": LEMON, "prompt": "What colour is grass?"}, '"prompt" .* not read in this layout'),
        ({"messages": LEMON, "conversations": LEMON}, '"conversations" .* not read in this layout'),
        ({"prompt": "a", "question": "b", "answer": "c"}, '"prompt" .* not read|"question" .* not read'),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "--loss=dpo"),
        ({"messages": [*LEMON, {**LEMON[0], "tool_calls": [{"name": "f"}]}, LEMON[1]]}, "belongs to the assistant"),
        ({"messages": [message("tool", "5"), *LEMON]}, "no call comes before it"),
        ({"messages": [LEMON[0], message("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": "{"}}])]},
         "arguments of f in message 2"),
        ({"messages": [LEMON[0], message("assistant", None, tool_calls=[{"function": {"arguments": {}}}])]}, "a call of"),
        ({"messages": LEMON, "tools": [{"description": "no name"}]}, '"tools" must hold functions'),
        ({"messages": LEMON, "tools": [TOOL], "functions": [{"name": "f"}]}, '"tools" and "functions" differ'),
        ({"messages": LEMON, "tools": "one, two"}, "tools.* is expected|list under"),
        ({"messages": LEMON, "chat_template_kwargs": {"messages": []}}, "may not hold messages"),
        ({"conversations": [said("function_call", "get_time"), said("gpt", "x")]}, "a call as content of message 1"),
        ({"messages": [LEMON[0], message("assistant", None, refusal="No.")]}, "refusal"),
        ({"messages": [LEMON[0], message("assistant", "4", reasoning_content="a", thinking="b")]},
         '"reasoning_content" and "thinking" of message 2 differ'),
        ({"messages": [LEMON[0], message("assistant", None, tool_calls=[{"name": "f"}], function_call={"name": "g"})]},
         '"tool_calls" and "function_call" of message 2 differ'),
        ({"messages": [LEMON[0], message("tool_call", '{"name": "f"}', tool_calls=[{"name": "g"}])]},
         '"content" and "tool_calls" of message 2 differ'),
        ({"messages": [LEMON[0], message("assistant", "a", value="b")]}, '"content" and "value" of message 2 differ'),
        ({"messages": [{**LEMON[0], "from": "gpt"}, LEMON[1]]}, '"role" and "from" of message 1 differ'),
        ({"messages": [message("user", "q", assistant="a"), LEMON[1]]}, '"assistant" is not read beside the role'),
        ({"messages": [{"human": "q", "assistant": "a", "gpt": "b"}]}, '"gpt" is not read beside the role of message 2'),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_by_name(record: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f"{json.dumps({'messages': LEMON})}\n{json.dumps(record)}\n")
    with pytest.raises(UserError, match=f"(?s)line 2: .*({words})"):
        CustomJSON(path, own_format=False)


@pytest.mark.parametrize("label", ["False", "false", " no", "0", "1", "-1", "0.0", "[0, 1]"])
def test_the_label_of_a_bad_answer_is_refused_in_a_table_too(label: str, tmp_path: Path) -> None:
    path = tmp_path / "kto.csv"
    path.write_text(f'prompt,completion,label\na,b,True\na,b,greeting\na,b,\na,b,"{label}"\n')
    with pytest.raises(UserError, match='line 5: the key "label" cannot be honoured'):
        CustomJSON(path)
    assert len(CustomJSON(path, skip_bad_lines=True)) == 3


def test_no_key_has_two_rules_and_every_tool_has_a_version() -> None:
    for rows in (RECORD, MESSAGE):
        keys = [key for row in rows for key in row.keys]
        assert len(keys) == len(set(keys))
        assert {name for row in rows for name in row.tools.split(", ")} <= {*VERSIONS, "data sets"}


@pytest.mark.parametrize("page", ["docs/data.md", "docs/zh/data.md"])
def test_the_documents_show_every_key_and_version(page: str) -> None:
    text = Path(page).read_text(encoding="utf-8")
    for row in (*RECORD, *MESSAGE):
        for key in row.keys:
            assert f"`{key}`" in text, key
    assert all(version.rpartition(" ")[2] in text for version in VERSIONS.values())


# --- files ---------------------------------------------------------------------------------------

LINE = json.dumps({"messages": LEMON})
PRETTY = json.dumps({"messages": LEMON}, indent=2)
ALPACA = json.dumps({"instruction": "What colour is a lemon?", "output": "Yellow."})
SHAREGPT = json.dumps({"conversations": [said("human", "What colour is a lemon?"), said("gpt", "Yellow.")]})
CELL = '"' + json.dumps(LEMON).replace('"', '""') + '"'
FILES: dict[str, bytes] = {
    "bom_crlf.jsonl": ("\ufeff" + f"{LINE}\r\n{LINE}\r\n").encode(),
    "utf16.jsonl": f"{LINE}\n{LINE}\n".encode("utf-16"),
    "lines.jsonl.gz": gzip.compress(f"{LINE}\n{LINE}\n".encode(), mtime=0),
    "no-ending": gzip.compress(f"{LINE}\n{LINE}\n".encode(), mtime=0),
    "list.json": json.dumps([{"messages": LEMON}] * 2).encode(),
    "pretty_list.json": json.dumps([{"messages": LEMON}] * 2, indent=1).encode(),
    "data_key.json": json.dumps({"version": "1", "data": [{"messages": LEMON}] * 2}, indent=1).encode(),
    "data_key_on_a_line.json": json.dumps({"data": [{"messages": LEMON}] * 2}).encode(),
    "pretty_objects.json": f"{PRETTY}\n{PRETTY}\n".encode(),
    "lists_of_messages.json": f"{json.dumps(LEMON)}\n{json.dumps(LEMON)}\n".encode(),
    "mixed_layouts.jsonl": f"{ALPACA}\n{SHAREGPT}\n".encode(),
    "table.csv": b"instruction,output,id\nWhat colour is a lemon?,Yellow.,1\nWhat colour is a lemon?,Yellow.,2\n",
    "messages.csv": f"messages\n{CELL}\n{CELL}\n".encode(),
    "table.CSV.gz": gzip.compress(b"\xef\xbb\xbfquestion,answer\n" + b"What colour is a lemon?,Yellow.\n" * 2, mtime=0),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_files_are_read_as_their_bytes_say(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    task = CustomJSON(path)
    assert [told(task[i]) for i in range(len(task))] == [YELLOW, YELLOW]


def test_the_index_of_a_table_that_pandas_saved_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(",question,answer\n0,one?,two\n")
    record = {"question": "one?", "answer": "two", "__index_level_0__": 0}
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "mine.parquet")
    for name in ("mine.csv", "mine.parquet"):
        assert CustomJSON(tmp_path / name)[0].messages[-1].text == "two"


def test_parquet_leaves_out_the_nulls_that_it_filled_in(tmp_path: Path) -> None:
    call = {"function": {"name": "get_time", "arguments": json.dumps({"city": "Oslo"})}}
    turns = [
        *LEMON,
        message("user", "Time?"),
        message("assistant", None, tool_calls=[call]),
        message("tool", "12:05", name="get_time"),
    ]
    records = [{"messages": turns, "tools": None}, {"messages": LEMON, "tools": json.dumps([TOOL])}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "mine.parquet")
    task = CustomJSON(tmp_path / "mine.parquet", own_format=False)
    assert told(task[0]) == [*YELLOW, "user: Time?", 'assistant:  get_time{"city": "Oslo"}', "tool: 12:05"]
    assert task[1].options["tools"][0]["function"] == TOOL and not task[0].messages[0].fields


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gbk.jsonl", '{"question": "法国的首都是哪里？", "answer": "巴黎"}'.encode("gb18030"), "iconv -f GB18030 -t UTF-8"),
        ("kana.jsonl", '{"question": "これは何ですか", "answer": "ﾃｽﾄ"}'.encode("shift_jis"), "iconv -f "),
        ("utf16.jsonl", LINE.encode("utf-16-le"), "iconv -f UTF-16LE"),
        ("chats.xlsx", b"PK\x03\x04 sheet", "save the sheet as CSV"),
        ("chats.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("chats.jsonl.zst", b"\x28\xb5\x2f\xfd....", "zstd -d"),
        ("chats.jsonl.gz", gzip.compress(LINE.encode(), mtime=0)[:40], "is damaged"),
        ("chats.parquet", b"PAR1 nonsense", "cannot be read"),
        ("chats.csv", b'question,answer\n"a,b\n', "is not CSV"),
        ("chats.csv", b"question,answer\na,b,c\n", "line 2: it needs 2 cells"),
        ("chats.json", f"{PRETTY}\n{PRETTY[:-1]}".encode(), "line [0-9]+: this is not JSON"),
        ("chats.json", json.dumps({"data": [LEMON], "system": "You are Pip."}).encode(), "system"),
        ("chats.jsonl", b"{" * 100_000, "nested too deeply|not JSON"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_says_why_and_what_to_do(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"(?s){name}.*({words})"):
        CustomJSON(path)


def test_folders_and_patterns_are_read_without_hidden_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jsonl", "deep/b.JSON", "deep/c.csv", "._a.jsonl", ".cache/d.jsonl", "readme.md"):
        path = tmp_path / "chats" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        record = json.dumps({"question": name, "answer": "a"})
        path.write_text("question,answer\nq,a\n" if name.endswith("csv") else record)
    assert len(CustomJSON(tmp_path / "chats")) == 3
    mix = own_conversations([str(tmp_path / "chats")])
    assert capsys.readouterr().out.count("2 hidden files") == 2  # once for each reading
    assert len(CustomJSON(tmp_path / "chats" / "*.jsonl")) == 1
    assert len(own_conversations([f"{tmp_path}/chats/**/*.[jJ]*:2"]).load()) == 4
    (tmp_path / "chats" / "a.jsonl").write_text(f"{LINE}\n{LINE}\n")
    assert own_conversations([str(tmp_path / "chats")]).key != mix.key
    with pytest.raises(UserError, match="no file"):
        CustomJSON(tmp_path / "chats" / "*.parquet")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("data/my.chats.jsonl", "my.chats"),
        ("chats.JSONL.gz", "chats"),
        ("data/chats", "chats"),
        ("data/chats/**/*.json", "chats"),
        ("chats.v1/*.jsonl", "chats.v1"),
        ("data/v[12]/*.jsonl", "data"),
    ],
)
def test_a_run_is_named_after_its_data(source: str, name: str) -> None:
    assert name_of(source) == name


def test_folders_of_two_versions_have_two_names(tmp_path: Path) -> None:
    for name in ("chats-1.5", "chats-1.7"):
        (tmp_path / name).mkdir()
        assert name_of(str(tmp_path / name)) == name_of(f"{tmp_path / name}/*.jsonl") == name


# --- bad lines -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [f"{LINE},", f"{LINE} x", "[" * 100_000, '{"n": ' + "1" * 5000 + "}"],
    ids=["comma", "words", "depth", "digits"],
)
def test_a_bad_first_line_does_not_drop_the_others(first: str, tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join([first, *[LINE] * 20, "{"]))
    with pytest.raises(UserError, match=r"(?s)2 of 22 lines.*line 1: this is not JSON.*line 22: this is not JSON"):
        CustomJSON(path)
    assert len(CustomJSON(path, skip_bad_lines=True)) == 20


@pytest.mark.parametrize(
    "mistake", [f"{PRETTY},", "[\n" + "[" * 100_000, '{\n"n": ' + "1" * 5000 + "}"], ids=["comma", "depth", "digits"]
)
def test_after_a_mistake_between_values_over_lines_the_rest_is_not_taken(mistake: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(f"{PRETTY}\n{mistake}\n{PRETTY}\n")
    with pytest.raises(UserError, match=r"mine\.json, line [0-9]+: (this is not JSON|it is nested too deeply)"):
        CustomJSON(path)


def test_all_bad_lines_are_counted_and_may_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "many.jsonl"
    bad = ['{"messages": []}', "{", "5", '{"a": 1}', '{"messages": 5}', "\xff", '{"messages": [1]}']
    path.write_bytes("\n".join([LINE] * 20 + bad + [LINE] * 20).encode("latin-1"))
    with pytest.raises(UserError, match="7 of 47 lines") as refused:
        CustomJSON(path)
    shown = str(refused.value)
    assert "line 21" in shown and "line 25" in shown and "line 26" not in shown and "2 more" in shown
    assert "--skip_bad_lines" in shown
    assert len(CustomJSON(path, skip_bad_lines=True)) == 40
    output = capsys.readouterr()
    assert "7 of 47 lines" in output.out + output.err
    path.write_text("\n".join(bad[:3]))
    with pytest.raises(UserError, match="3 of 3 lines"):
        CustomJSON(path, skip_bad_lines=True)
