"""The terminal chat with a tiny checkpoint: clean output, commands, Ctrl-C, and chats longer than the context."""

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.common import UserError
from nanochat.data.conversation import Part, assistant, system, user
from nanochat.engine import Engine, Event
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.serve.cli.terminal import harmless
from nanochat.serve.formats.pieces import Thought
from nanochat.serve.formats.thoughts import Marks, Thoughts
from scripts import chat_cli, chat_web
from scripts.chat_cli import TEXTS, Chat, Config
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu, tiny_checkpoint, tiny_gpt, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
TOKENIZER = tiny_tokenizer()


@pytest.fixture(autouse=True)
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    monkeypatch.setenv("LANG", "en_US.UTF-8")
    monkeypatch.delenv("LC_ALL", raising=False)


def open_chat(monkeypatch: pytest.MonkeyPatch, **flags: Any) -> tuple[Chat, io.StringIO, io.StringIO]:
    """A chat that writes its replies and notes to memory."""
    tiny_checkpoint()
    out, notes = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    return chat_cli.open_chat(Config(max_tokens=8, temperature=0.0, **flags), notes), out, notes


def said(tokens: list[int]) -> str:
    return "".join(part.text for part in reply_parts(tokens, TOKENIZER) if part.kind == "text")


Typed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Typed:
    """Run a command line with a pipe as standard input; return exit code, standard output and standard error."""

    def run(*flags: str, stdin: bytes = b"", encoding: str = "utf-8") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["chat_cli", "-m", "8", "-t", "0", *flags])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding=encoding))
        code = 0
        try:
            chat_cli.run(chat_cli.main, Config)
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, *capfd.readouterr()

    return run


# --- one answer ----------------------------------------------------------------------------------


def test_only_the_answer_is_on_standard_output_and_pipe_and_flag_give_the_same(typed, monkeypatch):
    tiny_checkpoint("mid")
    tiny_checkpoint("sft")
    prompt = [TOKENIZER.bos, TOKENIZER.special("user_start"), *TOKENIZER.encode("the cat 猫")]
    prompt += [TOKENIZER.special("user_end"), TOKENIZER.special("assistant_start")]
    (expected,) = Engine(tiny_gpt(TOKENIZER.vocab_size), TOKENIZER).generate([prompt], Sampling(0.0, max_tokens=8))
    code, out, notes = typed("-p", "the cat 猫")
    assert code == 0 and out == harmless(said(expected.tokens)) + "\n"
    assert "stage sft, tag d2, step 3" in notes and "\033" not in notes
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    code, piped, notes = typed(stdin="the cat 猫\n".encode())
    assert code == 0 and piped == out and "阶段 sft" in notes
    assert typed(stdin="the cat 猫\n".encode(), encoding="ascii")[:2] == (0, out)  # as in the locale C
    assert typed(stdin=b"cat \xff\xfe mat")[0] == 0  # bytes that are no text


@pytest.mark.parametrize(
    ("flags", "stdin", "code", "message"),
    [
        (("-p", "  "), b"", 2, "the prompt is empty"),
        ((), b"\n", 2, "the prompt is empty"),
        (("-p", "cat " * 300), b"", 1, "the prompt is too long.*160"),
        (("-p", "cat", "-k", "-1"), b"", 2, "top_k"),
        (("-p", "cat", "-t", "101"), b"", 2, "--temperature must be from 0 to 100, got 101: type --temperature 1, for"),
        (("-p", "cat", "--context", "10"), b"", 2, "--context must be from 32 to 160, .* got 10"),
        (("-p", "cat", "--url", "http://127.0.0.1:9", "-g", "d2"), b"", 2, "--model_tag is about a model .* --url"),
    ],
)
def test_what_cannot_be_answered_is_one_message_and_no_output(flags, stdin, code, message, typed):
    tiny_checkpoint()
    ended, out, err = typed(*flags, stdin=stdin)
    assert ended == code and out == ""
    assert re.search(message, err) and err.count("error:") == 1


@pytest.mark.parametrize(
    ("corpus", "flags", "temperature", "min_p"),
    [
        ("tinyworld", {}, 1.0, 0.5),
        ("fineweb", {}, 0.6, 0.0),
        ("tinyworld", {"temperature": 0.9}, 0.9, 0.5),
        ("tinyworld", {"min_p": 0.1}, 1.0, 0.1),
    ],
)
def test_how_words_are_drawn_suits_the_model_and_is_said(corpus, flags, temperature, min_p):
    tiny_checkpoint(corpus=corpus)
    notes = io.StringIO()
    sampling = chat_cli.open_chat(Config(**flags), notes).sampling
    assert (sampling.temperature, sampling.min_p) == (temperature, min_p)
    assert f"temperature {temperature:g}, min-p {min_p:g}: " in notes.getvalue()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, Sampling(0.7, 20, 512, top_p=0.8, repetition_penalty=1.05)),
        ({"top_k": 0, "max_tokens": 9}, Sampling(0.7, None, 9, top_p=0.8, repetition_penalty=1.05)),
        ({"temperature": 0.0}, Sampling(0.0, 20, 512, top_p=0.8, repetition_penalty=1.05)),
    ],
)
def test_a_published_model_is_sampled_as_its_publisher_says_unless_flags_differ(flags, expected, tmp_path):
    write_folder(tmp_path, "qwen3")
    stated = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    notes = io.StringIO()
    assert chat_cli.open_chat(Config(model=tmp_path, **flags), notes).sampling == expected
    assert f"{tmp_path.name} (published)" in notes.getvalue()


@pytest.mark.parametrize(("template", "longest"), [("{# </think> #}", 2048), ("", 512)])
def test_a_model_that_thinks_may_write_half_of_the_context(template, longest, tmp_path):
    """Its thoughts were cut off after 512 tokens, so that most questions had no answer."""
    config = write_folder(tmp_path, "qwen3") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 4096}))
    (tmp_path / "chat_template.jinja").write_text(template)
    assert chat_cli.open_chat(Config(model=tmp_path), io.StringIO()).sampling.max_tokens == longest
    (served,) = chat_web.models_of(chat_web.Config(model=tmp_path, slots=1), on_cpu())
    assert served.announced.max_tokens == longest


def test_a_checkpoint_of_nan_refuses_to_chat(typed, monkeypatch):
    real = chat_cli.choose

    def choose(*flags: Any) -> Any:
        chosen = real(*flags)
        with torch.no_grad():
            chosen.loaded.model.wte.weight.fill_(math.nan)
        return chosen

    tiny_checkpoint()
    monkeypatch.setattr(chat_cli, "choose", choose)
    code, out, notes = typed("-p", "the cat")
    assert (code, out) == (1, "") and "error:" in notes and "NaN" in notes


# --- the chat ------------------------------------------------------------------------------------


def test_turns_add_up_and_the_model_sees_them(monkeypatch):
    chat, out, _ = open_chat(monkeypatch, system="be the cat")
    assert chat_cli.reply(chat, "the mat") and chat_cli.reply(chat, "猫 on 12")
    assert [message.role for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    prompt = TOKENIZER.render_prompt(chat_cli.Conversation(tuple(chat.messages)))
    (expected,) = Engine(chat.speaker.loaded.model, TOKENIZER).generate([prompt], Sampling(0.0, max_tokens=8))
    assert out.getvalue().splitlines()[1] == harmless(said(expected.tokens))


def test_words_and_calculator_calls_are_shown_apart_and_cannot_steer_the_terminal(monkeypatch):
    chat, out, notes = open_chat(monkeypatch)
    call = ""
    for part in (Part("text", "12*12 is "), Part("python", "12*12"), Part("python_output", "144"), Part("text", "144")):
        call = chat_cli.show(part, chat, call)
    assert out.getvalue() == "12*12 is 144" and notes.getvalue().endswith("[12*12 = 144]\n")
    chat_cli.show(Part("text", "a\x1b[2Jb\x07c\td\n\x9be"), chat, "")
    assert out.getvalue().endswith("a\ufffd[2Jb\ufffdc\td\n\ufffde")


def test_a_reply_that_ends_within_a_calculator_call_shows_the_call(monkeypatch):
    chat, _, notes = open_chat(monkeypatch)
    tokens = [TOKENIZER.special("python_start"), *TOKENIZER.encode("12*12"), TOKENIZER.special("assistant_end")]
    events = [Event(0, token, 0.0, False, None) for token in tokens]
    monkeypatch.setattr(chat.speaker.engine, "step", lambda: [events.pop(0)])
    monkeypatch.setattr(type(chat.speaker.engine), "busy", property(lambda engine: bool(events)))
    chat_cli.reply(chat, "cat")
    assert "[12*12 ...]" in notes.getvalue()


def test_the_first_turns_are_left_out_when_the_context_is_full_and_it_is_said(monkeypatch):
    chat, _, notes = open_chat(monkeypatch, system="cat")
    asked = [f"{'mat ' * 5}{i}" for i in range(8)]
    for question in asked:
        chat_cli.reply(chat, question)
    assert [message.text for message in chat.messages if message.role == "user"] == asked
    assert "no longer sees the first 2 messages" in notes.getvalue()
    tokens = chat_cli.prompt_tokens(chat, chat.speaker, "the end")
    assert len(tokens) <= chat.speaker.engine.length - 8
    assert TOKENIZER.decode(tokens).startswith("<|bos|><|user_start|>cat\n\n")
    with pytest.raises(UserError, match="too long"):
        chat_cli.reply(chat, "cat " * 300)
    assert len(chat.messages) == 17 and not chat.speaker.engine.busy


def test_a_chat_with_a_model_that_thinks_is_continued_by_one_that_does_not(monkeypatch):
    chat, _, _ = open_chat(monkeypatch)
    thinking = replace(assistant("Two"), fields={"reasoning_content": "I add."})
    chat.messages = [user("1 + 1?"), thinking]
    tokens = chat_cli.prompt_tokens(chat, chat.speaker, "the cat")
    chat.messages = [user("1 + 1?"), assistant("Two")]
    assert tokens == chat_cli.prompt_tokens(chat, chat.speaker, "the cat")


def test_a_base_model_continues_the_text(monkeypatch):
    chat, _, _ = open_chat(monkeypatch)
    chat.speaker.loaded = replace(chat.speaker.loaded, stage="base")
    assert chat_cli.prompt_tokens(chat, chat.speaker, "the cat") == [TOKENIZER.bos, *TOKENIZER.encode("the cat")]


def test_ctrl_c_stops_the_reply_only_and_keeps_what_was_said(monkeypatch):
    chat, _, notes = open_chat(monkeypatch)
    step = chat.speaker.engine.step

    def press() -> list[Any]:
        if chat.speaker.engine.passes == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    monkeypatch.setattr(chat.speaker.engine, "step", press)
    before = signal.getsignal(signal.SIGINT)
    assert chat_cli.reply(chat, "the cat") is False
    assert signal.getsignal(signal.SIGINT) is before
    assert "stopped" in notes.getvalue() and not chat.speaker.engine.busy and len(chat.messages) == 2
    monkeypatch.setattr(chat.speaker.engine, "step", step)
    assert chat_cli.reply(chat, "the cat")


def test_a_second_ctrl_c_ends_the_reply_and_not_the_chat(monkeypatch):
    """A pass of a large model takes seconds, in which a reader presses the keys again."""
    chat, _, notes = open_chat(monkeypatch)
    engine = chat.speaker.engine
    step = engine.step
    lines = iter(["the cat", "the cat", "/quit"])
    presses = iter([2])

    def press() -> list[Any]:
        events = step()
        for _ in range(next(presses, 0) if events else 0):
            os.kill(os.getpid(), signal.SIGINT)
        return events

    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(engine, "step", press)
    chat_cli.converse(chat)
    assert notes.getvalue().count("stopped") == 1 and not engine.busy
    assert [message.role for message in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize("opened", [True, False])
def test_thoughts_are_notes_and_part_of_the_message_without_their_marks(monkeypatch, opened):
    chat, out, notes = open_chat(monkeypatch)
    thoughts = Thoughts(Marks("<think>", "</think>"), opened)
    texts = ["" if opened else "<think>\n", "I a", "dd.</thi", "nk>\n\nTw", "o"]
    pieces = []
    for i, text in enumerate(texts):
        for piece in chat_cli.thoughts_apart([Part("text", text)], thoughts, last=i == 4):
            pieces.append(piece)
            chat_cli.show(piece, chat, "")
    assert out.getvalue() == "Two"
    assert notes.getvalue().endswith("I add.\n\n")
    message = chat_cli.message_of(pieces)
    assert message == replace(assistant("Two"), fields={"reasoning_content": "I add."})
    assert chat_cli.message_of([Thought("cut off")]) is None


@pytest.mark.parametrize(("flag", "text"), [("auto", "none"), ("on", "True"), ("off", "False")])
def test_the_switch_of_a_template_is_set_and_a_template_without_one_refuses(flag, text, tmp_path):
    folder = write_folder(tmp_path, "qwen3")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ enable_thinking | default('none') }}]"
    (folder / "chat_template.jinja").write_text(template)
    chat = chat_cli.open_chat(Config(model=folder, thinking=flag), io.StringIO())
    prompt = chat_cli.prompt_tokens(chat, chat.speaker, "why")
    assert chat.speaker.loaded.tokenizer.decode(prompt) == f"why[{text}]"
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    if flag != "auto":
        with pytest.raises(UserError, match="--thinking"):
            chat_cli.open_chat(Config(model=folder, thinking=flag), io.StringIO())


# --- commands ------------------------------------------------------------------------------------


def test_switches_of_the_model_are_words_and_no_commands():
    for words in ("/no_think why?", "/think", "why /temp", " /temp 1", ""):
        assert not chat_cli.is_command(words)
    assert all(map(chat_cli.is_command, ("/temp 1", "/", "/ think", "/no_thinking", "/dance")))


def test_commands_change_the_settings_and_say_so(monkeypatch):
    chat, _, notes = open_chat(monkeypatch)
    for line in ("/temp 0.9", "/topk 7", "/max 33"):
        assert chat_cli.command(chat, line)
    assert chat.sampling == Sampling(0.9, 7, 33, min_p=0.5)
    assert chat_cli.command(chat, "/topk 0") and chat.sampling.top_k is None
    chat_cli.command(chat, "/help")
    assert all(name in notes.getvalue() for name in re.findall(r"/\w+", TEXTS["zh"]["help"]))
    assert not chat_cli.command(chat, "/quit")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("/temp warm", "'warm'"),
        ("/temp -1", "/temp must be from 0 to 100, got -1: type /temp 1, for"),
        ("/temp 1e30", "/temp must be from 0 to 100, got 1e\\+30"),
        ("/temp nan", "/temp must be from 0 to 100, got nan"),
        ("/topk 1.5", "a whole number"),
        ("/max 0", "/max must be from 1 to 160, got 0: .* Type /max 50, for"),
        ("/max 161", "/max must be from 1 to 160, got 161"),
        ("/save", "a file name"),
        ("/save /dev/null/chat.json", "cannot be written"),
        ("/load /no/such/file", "cannot be read"),
        ("/save ~nobody_x/chat.json", "~nobody_x/chat.json"),
        ("/save a\0b.json", "cannot be written"),
        ("/dance", "no command /dance"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_and_changes_nothing(line, word, monkeypatch):
    chat, _, _ = open_chat(monkeypatch)
    before = chat.sampling
    with pytest.raises(UserError, match=word):
        chat_cli.command(chat, line)
    assert chat.sampling == before and chat.messages == []


def test_new_keeps_the_instructions_and_system_replaces_them(monkeypatch):
    chat, _, _ = open_chat(monkeypatch)
    chat_cli.command(chat, "/system be brief")
    chat_cli.reply(chat, "cat")
    chat_cli.command(chat, "/new")
    assert chat.messages == [system("be brief")]
    chat_cli.command(chat, "/system")
    assert chat.messages == []


def test_a_saved_chat_is_loaded_as_it_was(monkeypatch, tmp_path):
    chat, _, _ = open_chat(monkeypatch, system="be brief")
    call = (Part("python", "1+1"), Part("python_output", "2"))
    answer = replace(assistant("It is ", *call, "2."), fields={"reasoning_content": "I add."})
    chat.messages += [user("1+1 等于几？"), answer]
    messages, path = list(chat.messages), tmp_path / "a chat.json"
    chat_cli.command(chat, f"/save {path}")
    chat_cli.command(chat, "/new")
    chat_cli.command(chat, f"/load {path}")
    assert chat.messages == messages
    assert [message.fields for message in chat.messages] == [message.fields for message in messages]
    assert "1+1 等于几？" in path.read_text(encoding="utf-8")
    chat_cli.command(chat, "/new")
    with pytest.raises(UserError, match="/load"):  # /save for /load emptied the file
        chat_cli.command(chat, f"/save {path}")
    assert "1+1 等于几？" in path.read_text(encoding="utf-8")


def test_both_languages_have_the_same_texts_with_the_same_values():
    def values(text: str) -> set[str]:
        return set(re.findall(r"{(\w+)", text))

    assert TEXTS["en"].keys() == TEXTS["zh"].keys()
    assert all(values(TEXTS["en"][name]) == values(TEXTS["zh"][name]) for name in TEXTS["en"])


# --- a terminal ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_terminal_chat_from_hello_to_quit(base_folder):
    tiny_checkpoint()
    keyboard, screen = pty.openpty()
    command = [sys.executable, "-m", "scripts.chat_cli", "-m", "8", "-t", "0", "--lang", "zh"]
    process = subprocess.Popen(command, cwd=ROOT, stdin=screen, stdout=screen, stderr=subprocess.PIPE)
    os.close(screen)
    shown = b""

    def until(text: str) -> None:
        """Read until the terminal shows this text."""
        nonlocal shown
        while text.encode() not in shown:
            assert select.select([keyboard], [], [], 120)[0], shown.decode(errors="replace")
            shown += os.read(keyboard, 4096)
        shown = shown.split(text.encode(), 1)[1]

    try:
        until("输入 /help 查看命令")
        until("> ")
        os.write(keyboard, b'"""the cat\n')
        until("... ")
        os.write(keyboard, '猫"""\n'.encode())
        until("个词元，每秒")
        until("> ")
        os.write(keyboard, b"/dance\n")
        until("没有命令 /dance")
        until("> ")
        os.write(keyboard, b"\x04")
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
    finally:
        process.kill()
        os.close(keyboard)
    history = base_folder / "chat_history"
    assert "/dance" in history.read_text() and history.stat().st_mode & 0o777 == 0o600
