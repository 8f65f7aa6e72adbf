"""The benchmark of the server: what it counts, and the model that is compared."""

import dataclasses
import json
import os
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from bench.serve import __main__ as serve
from bench.serve import model as bench_model
from bench.serve import servers, streams, thoughts
from bench.serve.servers import Server
from bench.serve.streams import Load
from bench.training import QWEN3
from nanochat import device
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError
from nanochat.data.conversation import chat


def event(text: str = "", **fields: Any) -> bytes:
    """A server-sent event with a piece of a reply."""
    content = {"choices": [{"delta": {"role": "assistant", "content": text}}], **fields}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


USAGE = event(usage={"completion_tokens": 3, "prompt_tokens": 9})
EVENTS = event() + b": a comment\n\n" + event("hé") + event("llo") + USAGE + b"data: [DONE]\n\n"


def reply_to(answer: bytes) -> streams.Reply:
    """What a client sees of an answer that a server sends in pieces of 7 bytes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline() != b"\r\n":
                pass
            self.rfile.read(2)
            for start in range(0, len(answer), 7):
                self.wfile.write(answer[start : start + 7])

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request).start()
        return streams.ask(server.server_address[1], b"{}")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_stream_is_read_and_its_tokens_are_counted(chunked: bool) -> None:
    answer = b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS
    if chunked:
        answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        for piece in (EVENTS[:31], EVENTS[31:], b""):  # a border inside of an event
            answer += f"{len(piece):x}\r\n".encode() + piece + b"\r\n"
    reply = reply_to(answer)
    assert reply.tokens == 3
    assert reply.first_seconds > 0


def test_the_first_text_may_be_a_thought_and_is_timed_by_the_clock_that_is_given() -> None:
    reply = streams.Reply()
    reply.add({"choices": [{"delta": {"content": ""}}]}, 1.0)
    for seconds, tokens in ((2.0, 3), (4.0, 5)):
        delta = {"reasoning_content": "hm"}
        usage = {"completion_tokens": tokens, "prompt_tokens": 9}
        reply.add({"choices": [{"delta": delta}], "usage": usage}, seconds)
    assert (reply.first_seconds, reply.first_tokens, reply.tokens) == (2.0, 3, 5)
    server = Server("x", 1, os.getpid(), "model")
    assert server.cpu_clock() == pytest.approx(time.process_time(), abs=0.1)


def test_thoughts_are_compared_pair_by_pair() -> None:
    text = [thoughts.Cost(1.0, 2.0, 1), thoughts.Cost(10.0, 20.0, 1), thoughts.Cost(2.0, 4.0, 1)]
    thought = [thoughts.Cost(1.5, 2.0, 2), thoughts.Cost(11.0, 21.0, 1), thoughts.Cost(2.0, 8.0, 3)]
    result = thoughts.figures({"thoughts": thought, "text": text})
    assert (result["first_ratio"], result["total_ratio"]) == (1.1, 1.05)
    assert (result["first_cpu_seconds"], result["later_tokens"]) == (2.0, 2)


def test_answers_that_cannot_be_counted_are_refused() -> None:
    with pytest.raises(UserError, match="without its usage"):
        reply_to(b"HTTP/1.1 200 OK\r\n\r\n" + event("hé"))
    with pytest.raises(UserError, match="answered 422: no such field"):
        reply_to(b"HTTP/1.1 422 Unprocessable\r\n\r\nno such field")


def test_cpu_seconds_are_those_of_a_process_and_its_children() -> None:
    line = "12 (a (b) c) S 1 1 1 0 -1 4194304 123 0 0 0 150 50 30 20 20 0 4 0 2296 31 363"
    assert servers.stat_seconds(line) == pytest.approx(250 / servers.TICKS)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        while len(servers.family(parent.pid)) < 2:
            time.sleep(0.01)
        assert servers.family(parent.pid)[0] == parent.pid
        server = Server("x", 1, parent.pid, "model")
        assert server.cpu_seconds() >= 0
    assert server.cpu_seconds() == 0  # it is gone


def test_a_server_that_does_not_start_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    message = r"the server of x did not start; [^\n]*\n  no such model"
    log = tmp_path / "log"
    with pytest.raises(UserError, match=message), servers.running("x", command, "(ready)", log):
        pass


def loads_of(*speeds: float) -> dict[int, Load]:
    """Three rounds at each number of chats; the slower one took twice as long."""
    loads = {}
    for chats, speed in zip(serve.CHATS, speeds, strict=True):
        seconds = [100 / speed, 100 / speed, 200 / speed]
        loads[chats] = Load(seconds, [100] * 3, [0.5] * 99 + [speed])
    return loads


def test_ours_is_compared_with_each_peer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    loads = {
        "ours": loads_of(20.0, 60.0, 80.0),
        "llama-cpp": loads_of(10.0, 20.0, 40.0),
    }
    result = serve.figures(loads, ["llama-cpp"])
    assert result["times_as_fast_as"] == {"llama-cpp": {"1": 2.0, "8": 3.0, "32": 2.0}}
    assert result["served_tokens_per_cpu_second"]["ours"] == {"1": 20.0, "8": 60.0, "32": 80.0}
    assert result["first_token_p95_s"]["ours"] == 0.5
    serve.show(loads)
    assert "llama-cpp" in capsys.readouterr().out


def small_model(folder: Path, gguf: str | None = None) -> bench_model.Files:
    shape = dataclasses.replace(
        QWEN3,
        vocab_size=1024,
        n_layer=1,
        n_embd=64,
        n_hidden=64,
        n_head=2,
        n_kv_head=1,
        head_dim=32,
    )
    return MAKE(folder, shape, gguf, 100_000)


MAKE = bench_model.make


def test_the_model_is_the_same_in_every_form(tmp_path: Path) -> None:
    files = small_model(tmp_path, gguf="bfloat16")
    assert files.gguf.stat().st_size > 0
    loaded = load_published(files.folder, None, device.compute_init("cpu"))
    assert files.parameters == sum(weight.numel() for weight in loaded.model.parameters())
    # The last of the roles that need free rows has one.
    assert loaded.tokenizer.special("assistant_start") < loaded.model.config.vocab_size
    prompt = loaded.tokenizer.render_prompt(chat("x"))
    text = loaded.tokenizer.decode(prompt)
    assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.slow
def test_our_server_is_measured(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench_model, "make", small_model)
    serve.main(serve.Config(quick=True, chats=(1, 2)))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["served_tokens_per_cpu_second"]["ours"]) == {"0", "1", "2"}
