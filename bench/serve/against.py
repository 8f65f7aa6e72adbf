"""Compares servers of one model, which take turns, and measures what the clients of ours wait for."""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.serve import model, sides, streams
from bench.serve.sides import Side
from bench.serve.streams import Load
from bench.soak.figures import percentile
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.common import UserError, log

CHATS = (1, 8, 32)
ALONE = 3  # chats one after the other, where one runs alone: the system counts CPU time in hundredths of a second
PROMPT = 48  # tokens of a prompt for upstream, about as many as a question has
FORMATS = ("bfloat16", "float32")
Loads = dict[str, dict[int, Load]]  # side -> chats -> what was measured


class Upstream:
    """The process of upstream's engine."""

    def __init__(self, folder: Path, tokens: int, errors: Any):
        c = model.SHAPE
        shape = {
            "sequence_len": c.sequence_len,
            "vocab_size": c.vocab_size,
            "n_layer": c.n_layer,
            "n_head": c.n_head,
            "n_kv_head": c.n_kv_head,
            "n_embd": c.n_embd,
        }
        command = [
            sys.executable,
            str(sides.ROOT / "bench/serve/upstream_side.py"),
            json.dumps({"shape": shape, "tokens": tokens}),
        ]
        own = {
            **sides.ONE_THREAD,
            "PYTHONPATH": str(folder),
            "NANOCHAT_DTYPE": "bfloat16",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self._errors = errors
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.parameters = self._answer()["parameters"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        self._errors.seek(0)
        words = [words for words in self._errors.read().splitlines() if words.strip()][-5:]
        raise UserError("upstream's engine ended; its last lines:\n  " + "\n  ".join(words))

    def turn(self, chats: int, load: Load) -> None:
        """Generate for so many prompts, one after the other."""
        draw = random.Random(chats)
        prompts = [[draw.randrange(30_000) for _ in range(PROMPT)] for _ in range(chats)]
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the answer says why the process has ended
            print(json.dumps(prompts), file=self.process.stdin, flush=True)
        found = self._answer()
        load.seconds.append(found["seconds"])
        load.tokens.append(found["tokens"])
        load.first_seconds += found["first_seconds"]


@contextlib.contextmanager
def upstream(folder: Path, tokens: int) -> Iterator[Upstream]:
    """Start upstream's engine; it ends with the context."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        side = Upstream(folder, tokens, errors)
        try:
            yield side
        finally:
            side.process.kill()
            side.process.communicate()


def turn(side: Side, chats: int, tokens: int, number: int, load: Load) -> None:
    """Let so many chats run at once, or the only chat three times, and count. `number` is of the round: no two rounds
    ask the same."""
    first = 10_000 * number + 100 * chats
    sent = [
        streams.body(
            side.model,
            [{"role": "user", "content": streams.question(first + chat)}],
            tokens,
            **side.fields,
        )
        for chat in range(ALONE if chats == 1 else chats)
    ]
    before = sides.cpu_seconds(side.pid)
    if chats == 1:
        replies = [asyncio.run(streams.ask(side.port, each)) for each in sent]
    else:
        replies = asyncio.run(streams.ask_all(side.port, sent))
    load.seconds.append(sides.cpu_seconds(side.pid) - before)
    load.tokens.append(sum(reply.tokens for reply in replies))
    load.first_seconds += [reply.first_seconds for reply in replies]


@dataclass(frozen=True)
class Waits:
    """What clients of our server wait for: seconds of /health at p99 with 32 chats and of a slot that its client left,
    and the tokens of a second turn's prompt, all and those that were read."""

    health: float
    slot: float
    prompt: int
    read: int


def waits(side: Side, folder: Path, tokens: int) -> Waits:
    """Measure them on the server of a folder; the slowest of five slots counts."""
    asked = [
        streams.body(
            side.model,
            [{"role": "user", "content": streams.question(5_000_000 + chat)}],
            2 * tokens,
            **side.fields,
        )
        for chat in range(CHATS[-1])
    ]
    health = asyncio.run(streams.health_while(side.port, asked))
    long = streams.body(
        side.model, [{"role": "user", "content": streams.question(1)}], 1500, **side.fields
    )
    slot = max(asyncio.run(streams.leave(side.port, long)) for _ in range(5))
    (word,) = FolderTokenizer(folder, model.SHAPE.vocab_size).encode(" the")
    second = asyncio.run(streams.second_turn(side.port, side.model, word, tokens))
    return Waits(percentile(health, 0.99), slot, second.prompt, second.prompt - second.cached)


def compare(
    against: Sequence[str], folder: Path | None, rounds: int, tokens: int
) -> tuple[Loads, Waits, int]:
    """What was measured of ours and of each peer, what clients of ours wait for, and the parameters of the model. The
    sides take turns, and the first turns, which are short, do not count."""
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = model.make(place, formats=FORMATS if "llama-cpp" in against else ())
        servers = [stack.enter_context(sides.ours(files))]
        if "transformers" in against:
            servers.append(stack.enter_context(sides.transformers(files)))
        if "llama-cpp" in against:
            servers += [
                stack.enter_context(sides.llama_cpp(files, name, CHATS[-1])) for name in FORMATS
            ]
        last = (
            stack.enter_context(upstream(folder, tokens))
            if folder is not None and "upstream" in against
            else None
        )
        loads: Loads = {side.name: {chats: Load() for chats in CHATS} for side in servers}
        for side in servers:
            for chats in CHATS:
                turn(side, chats, 8, 0, Load())
            sides.pause(side.pid)
        for number in range(1, rounds + 1):
            for chats in CHATS:
                for side in servers:
                    sides.resume(side.pid)
                    turn(side, chats, tokens, number, loads[side.name][chats])
                    sides.pause(side.pid)
                if last is not None:
                    last.turn(chats, loads.setdefault("upstream", {}).setdefault(chats, Load()))
        sides.resume(servers[0].pid)
        return loads, waits(servers[0], files.folder, tokens), files.parameters


def best(loads: Mapping[str, Mapping[int, Load]], peer: str, chats: int) -> float:
    """Tokens per CPU second of a peer, in its faster number format."""
    return max(found[chats].speed for name, found in loads.items() if name.split()[0] == peer)


def figures(loads: Loads, against: Sequence[str]) -> dict[str, Any]:
    """Speeds of every side, and how many times as fast ours is, by the number of chats."""
    mine = loads["ours"]
    speeds = {
        name: {str(n): round(load.speed, 1) for n, load in found.items()}
        for name, found in loads.items()
    }
    ratios = {
        peer: {str(n): round(mine[n].speed / best(loads, peer, n), 2) for n in CHATS}
        for peer in against
    }
    firsts = {name: round(found[CHATS[-1]].first_p95, 3) for name, found in loads.items()}
    return {
        "served_tokens_per_cpu_second": speeds,
        "times_as_fast_as": ratios,
        "first_token_p95_s": firsts,
    }


def table(loads: Loads) -> str:
    """One line for each side."""
    lines = [
        f"{'tokens per CPU second':<22}"
        + "".join(f"{n:>6} chats" for n in CHATS)
        + "   TTFT p95 at 32, wall s"
    ]
    for name, found in loads.items():
        speeds = "".join(f"{found[n].speed:>12,.1f}" for n in CHATS)
        lines.append(f"{name:<22}{speeds}{found[CHATS[-1]].first_p95:>14.3f}")
    return "\n".join(lines)


def run(against: Sequence[str], folder: Path | None, rounds: int, tokens: int) -> dict[str, Any]:
    """Compare, print, and return the figures."""
    loads, waited, parameters = compare(against, folder, rounds, tokens)
    log(
        f"{parameters:,} parameters, {tokens} greedy tokens a chat, one thread each, median of {rounds} rounds"
    )
    log(table(loads))
    log(
        f"ours with {CHATS[-1]} chats: /health p99 {1e3 * waited.health:.0f} ms; a slot is free "
        f"{1e3 * waited.slot:.0f} ms after its client has left; a second turn reads {waited.read} of {waited.prompt} "
        "tokens"
    )
    return {
        **figures(loads, against),
        "health_p99_ms": round(1e3 * waited.health, 1),
        "slot_free_ms": round(1e3 * waited.slot, 1),
        "served_second_turn_tokens": waited.prompt,
        "served_second_turn_read": waited.read,
    }
