"""The benchmark of the server: what it counts, the model that is compared, and the engine alone."""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.serve import __main__ as serve
from bench.serve import model as bench_model
from bench.serve import servers, streams
from bench.serve.servers import Server
from bench.serve.streams import Load
from nanochat import device
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError
from nanochat.data.conversation import chat


def test_the_engine_alone_is_measured(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "VOCAB", 512)
    monkeypatch.setattr(serve, "QUICK_DEPTH", 1)
    serve.main(serve.Config(quick=True, rounds=1))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["tokens_per_cpu_second"]) == {"1", "8", "32"}


# --- beside other servers ------------------------------------------------------------------------


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"completion_tokens": 3, "prompt_tokens": 9}
ANSWER = [chunk(choices=[{"delta": {"role": "assistant", "content": ""}}]), b": a comment\n\n", chunk(**said("hé")),
          chunk(**said("llo")), chunk(choices=[], usage=USAGE), b"data: [DONE]\n\n"]  # fmt: skip


def answering(sent: bytes) -> streams.Reply:
    """What a client sees of an answer that a server sends in pieces of 7 bytes."""

    async def main() -> streams.Reply:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            for start in range(0, len(sent), 7):
                writer.write(sent[start : start + 7])
                await writer.drain()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await streams.ask(server.sockets[0].getsockname()[1], b"{}")

    return asyncio.run(main())


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_is_read_and_its_tokens_are_counted(chunked: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + (b"Transfer-Encoding: chunked\r\n" if chunked else b"") + b"\r\n"
    whole = b"".join(ANSWER)
    pieces = [whole[:31], whole[31:]] if chunked else []  # a border inside of an event
    sent = b"".join(f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces) + b"0\r\n\r\n"
    reply = answering(head + (sent if chunked else whole))
    assert (reply.text, reply.tokens) == ("héllo", 3)
    assert reply.first_seconds > 0


def test_the_first_text_counts_and_not_the_role() -> None:
    reply = streams.Reply()
    reply.add({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, 1.0)
    reply.add(said("a"), 2.0)
    reply.add(said("b"), 3.0)
    assert reply.first_seconds == 2.0


def test_answers_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UserError, match="without its usage"):
        answering(b"HTTP/1.1 200 OK\r\n\r\n" + ANSWER[2])
    with pytest.raises(UserError, match="answered 422: no such field"):
        answering(b"HTTP/1.1 422 Unprocessable\r\n\r\nno such field")


def test_cpu_seconds_are_those_of_a_process_and_its_children() -> None:
    line = "12 (a (b) c) S 1 1 1 0 -1 4194304 123 0 0 0 " + "150 50 30 20 20 0 4 0 2296 31 363"
    assert servers.stat_seconds(line) == pytest.approx(250 / servers.TICKS)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        while len(servers.family(parent.pid)) < 2:
            time.sleep(0.01)
        assert servers.family(parent.pid)[0] == parent.pid
        server = Server("x", 1, parent.pid, "model")
        assert server.cpu_seconds() >= 0
    assert server.cpu_seconds() == 0  # it is gone


def test_a_server_that_does_not_start_is_named() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with (
        pytest.raises(UserError, match=r"the server of x did not start; [^\n]*\n  no such model"),
        servers.running("x", command, r"(ready)"),
    ):
        pass


def loads(**speeds: tuple[float, ...]) -> serve.Loads:
    """Two rounds of each side; the slower one took twice as long."""
    made: serve.Loads = {}
    for name, by_chats in speeds.items():
        made[name] = {}
        for chats, speed in zip(serve.CHATS, by_chats, strict=True):
            seconds = [100 / speed, 100 / speed, 200 / speed]
            made[name][chats] = Load(seconds, [100] * 3, [0.5] * 99 + [speed])
    return made


def test_ours_is_compared_with_the_faster_format_of_a_peer() -> None:
    formats = {"llama-cpp a": (10.0, 10.0, 40.0), "llama-cpp b": (5.0, 20.0, 10.0)}
    found = loads(ours=(20.0, 60.0, 80.0), **formats)
    result = serve.figures(found, ["llama-cpp"])
    assert result["times_as_fast_as"] == {"llama-cpp": {"1": 2.0, "8": 3.0, "32": 2.0}}
    assert result["served_tokens_per_cpu_second"]["ours"] == {"1": 20.0, "8": 60.0, "32": 80.0}
    assert result["first_token_p95_s"]["ours"] == 0.5
    assert len(serve.table(found).splitlines()) == 4


def test_the_model_is_the_same_in_every_form(tmp_path: Path) -> None:
    shape = dataclasses.replace(bench_model.SHAPE, vocab_size=1024, n_layer=1, n_embd=64, n_hidden=64, n_head=2,
                                n_kv_head=1, head_dim=32)  # fmt: skip
    files = bench_model.make(tmp_path, shape, ("bfloat16",), 100_000)
    assert files.gguf["bfloat16"].stat().st_size > 0
    loaded = load_published(files.folder, None, device.compute_init("cpu"))
    assert loaded.model.config == shape and files.parameters == sum(p.numel() for p in loaded.model.parameters())
    assert loaded.tokenizer.special("assistant_start") < shape.vocab_size  # the last of the roles that need free rows
    prompt = loaded.tokenizer.render_prompt(chat("x"))
    assert loaded.tokenizer.decode(prompt) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("flags", "word"),
    [({"rounds": 0}, "--rounds"), ({"tokens": 1000}, "--tokens"), ({"only_servers": True}, "--against")],
)
def test_flags_that_cannot_be_measured_are_refused(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as refused:
        serve.main(serve.Config(**flags))
    assert refused.value.exit_code == 2
