"""The benchmark of inference: what it counts, and a run on a small model."""

import asyncio
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.serve import __main__ as serve
from bench.serve import against, engine, sides, streams, upstream_side
from bench.serve import model as bench_model
from nanochat import device
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError
from nanochat.data.conversation import chat
from nanochat.engine import Completion


def test_only_matrices_that_a_pass_reads_are_counted() -> None:
    model = engine.untrained(1, device.compute_init("cpu"), torch.bfloat16, 320)
    C, scalars = 128, 4 * (1 + 1 + 1 + 1)  # of resid, x0, smear_lambda and backout, in fp32
    gates = 2 * (12 * 1 + 24)  # of the value embedding and of the smear
    assert engine.weight_bytes(model) == 2 * (12 * C * C + 320 * C) + gates + scalars


def test_a_tokenizer_has_the_size_that_was_asked_for() -> None:
    assert engine.tokenizer(2048).vocab_size == 2048


def test_replies_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, words = engine.untrained(1, device.compute_init("cpu"), torch.float32, 320), engine.tokenizer(320)
    assert engine.exact(model, words, 3, 4) == engine.Exact(3, 3, 3)
    monkeypatch.setattr(engine, "replies", lambda *given: [Completion([1])] * 3)
    assert engine.exact(model, words, 3, 4) == engine.Exact(3, 0, 3)


def test_a_run_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "VOCAB", 512)
    monkeypatch.setattr(engine, "bandwidth", lambda: 1e10)
    untrained = engine.untrained
    monkeypatch.setattr(engine, "untrained", lambda depth, *given: untrained(1, *given))
    threads = torch.get_num_threads()
    try:
        serve.main(serve.Config(quick=True))
    finally:
        torch.set_num_threads(threads)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["batched_equal"] == result["prefix_equal"] == result["rows"] == 8
    assert set(result["adapter_rows_per_cpu_second"]) == {"base", "one", "four"}
    assert result["second_turn_read"] == 12 < result["second_turn_tokens"]


# --- beside other servers ------------------------------------------------------------------------


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"completion_tokens": 3, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}
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
    assert (reply.text, reply.tokens, reply.prompt, reply.cached) == ("héllo", 3, 9, 4)
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
    assert sides.stat_seconds(line) == pytest.approx(250 / sides.TICKS)
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as parent:
        while len(sides.family(parent.pid)) < 2:
            time.sleep(0.01)
        assert sides.family(parent.pid)[0] == parent.pid
        assert sides.cpu_seconds(parent.pid) >= 0
    assert sides.cpu_seconds(parent.pid) == 0  # it is gone


def test_a_server_that_does_not_start_is_named() -> None:
    code = "import sys; sys.exit('no such model')"
    with (
        pytest.raises(UserError, match=r"the server of x did not start; its last lines:\n  no such model"),
        sides.running("x", [sys.executable, "-c", code], r"(ready)"),
    ):
        pass


def loads(**speeds: tuple[float, ...]) -> against.Loads:
    """Two rounds of each side; the slower one took twice as long."""
    return {
        name: {n: streams.Load([100 / speed, 200 / speed], [100, 100], [0.5] * 99 + [speed])
               for n, speed in zip(against.CHATS, given, strict=True)} for name, given in speeds.items()
    }  # fmt: skip


def test_ours_is_compared_with_the_faster_format_of_a_peer() -> None:
    found = loads(ours=(20.0, 60.0, 80.0), **{"llama-cpp a": (10.0, 10.0, 40.0), "llama-cpp b": (5.0, 20.0, 10.0)})
    result = against.figures(found, ["llama-cpp"])
    assert result["times_as_fast_as"] == {"llama-cpp": {"1": 2.0, "8": 3.0, "32": 2.0}}
    assert result["served_tokens_per_cpu_second"]["ours"] == {"1": 10.0, "8": 30.0, "32": 40.0}  # the median round
    assert result["first_token_p95_s"]["ours"] == 0.5
    assert len(against.table(found).splitlines()) == 4


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


@pytest.mark.parametrize(("given", "why"), [
    ({"rounds": 0}, "--rounds must be at least 1"), ({"tokens": 1000}, "--tokens must be from 2 to 256"),
    ({"quick": True, "against": ("transformers",)}, "leave out"), ({"only_servers": True}, "add --against"),
    ({"against": ("upstream",)}, "belong together"), ({"upstream": Path("x")}, "belong together"),
    ({"against": ("upstream",), "upstream": Path("no such folder")}, "must name a folder"),
])  # fmt: skip
def test_flags_that_cannot_be_measured_are_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why) as failure:
        serve.main(serve.Config(**given))
    assert failure.value.exit_code == 2


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "PACKAGES", {"llama-cpp": ("no_such_package",)})
    with pytest.raises(UserError, match="llama-cpp needs no_such_package: run") as failure:
        serve.main(serve.Config(against=("llama-cpp",)))
    assert failure.value.exit_code == 2


def test_upstream_s_engine_answers_one_prompt_after_the_other() -> None:
    class Fake:
        def generate(self, prompt: list[int], max_tokens: int, temperature: float) -> Any:
            yield from [([1], [1])] * max_tokens

    found = upstream_side.answer(Fake(), [[1], [2], [3]], 4)
    assert found["tokens"] == 12 and len(found["first_seconds"]) == 3
    assert found["first_seconds"] == sorted(found["first_seconds"])
