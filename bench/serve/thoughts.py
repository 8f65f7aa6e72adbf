"""Measures what keeping thoughts apart costs: until the first delta, and in a whole reply.

python -m bench.serve.thoughts

Two servers have the same model, and templates that write the same prompts, which open a thought.
One template names the mark that closes thoughts, so that its server sends the reply as a thought;
the other does not, so that its server sends the same tokens as they are. The servers take turns,
those that wait are paused, and the medians of the ratios of pairs count. Times are CPU seconds of
the servers, which other work on the machine does not change.
"""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench import tables
from bench.processes import check_at_least
from bench.serve import model, servers, streams
from bench.serve.model import Files
from bench.serve.servers import Server
from bench.serve.streams import Reply
from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.common import UserError, log, read_json, write_json
from nanochat.data.command_line import run

OPENED = CHATML.replace("assistant\n", "assistant\n<think>\n")
CLOSED = "{# </think> #}"  # a comment, so that it changes no prompt
TEXT = 2_000_000  # characters that the vocabulary is trained on
WARMUPS = 3  # pairs that do not count
# Requests ask for the number of tokens so far with each piece.
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Config:
    """Print what keeping thoughts apart costs, and one JSON object on the last line."""

    pairs: int = 60
    """pairs of replies to the same prompt"""
    tokens: int = 32
    """tokens of a reply"""


@dataclass(frozen=True)
class Cost:
    """What one reply took."""

    first: float  # CPU seconds of the server until the first delta with text
    total: float  # CPU seconds of the server until the end of the reply
    first_tokens: int  # tokens of the reply until the first delta with text


def with_template(files: Files, name: str, template: str) -> Files:
    """Return a copy of a model, in a folder called `name`, with another chat template."""
    folder = files.folder.with_name(name)
    shutil.copytree(files.folder, folder)
    path = folder / "tokenizer_config.json"
    write_json(path, {**read_json(path), "chat_template": template})
    return Files(folder, files.gguf, files.parameters)


def cost_of(server: Server, number: int, tokens: int) -> Cost:
    """Resume a server, let it reply to the question of this number, and pause it again."""
    request = streams.body(server.model, number, tokens, **server.fields, **COUNTED)
    server.resume()
    start = server.cpu_clock()
    reply: Reply = streams.ask(server.port, request, server.cpu_clock)
    total = server.cpu_clock() - start
    server.pause()
    return Cost(reply.first_seconds, total, reply.first_tokens)


def measure(cfg: Config) -> dict[str, list[Cost]]:
    """Return the costs of all replies as thoughts and as text, in the order of the questions."""
    costs: dict[str, list[Cost]] = {"thoughts": [], "text": []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = model.make(folder, text=TEXT)
        templates = {"thoughts": CLOSED + OPENED, "text": OPENED}
        sides = {}
        for name, template in templates.items():
            sides[name] = stack.enter_context(servers.ours(with_template(files, name, template)))
            sides[name].pause()
        for number in range(WARMUPS + cfg.pairs):
            names = list(sides)
            for name in names if number % 2 else reversed(names):
                costs[name].append(cost_of(sides[name], number, cfg.tokens))
    return {name: pairs[WARMUPS:] for name, pairs in costs.items()}


def figures(costs: dict[str, list[Cost]]) -> dict[str, float]:
    """Return the medians of the ratios of thoughts to text, and of the CPU seconds of text."""
    both = zip(costs["thoughts"], costs["text"], strict=True)
    # A model with random weights may also write special tokens alone, which are no text.
    pairs = [(thought, text) for thought, text in both if thought.first and text.first]
    if not pairs:
        raise UserError("no pair of replies has text: let them have more tokens, with --tokens")
    return {
        "first_ratio": median(thought.first / text.first for thought, text in pairs),
        "total_ratio": median(thought.total / text.total for thought, text in pairs),
        "first_cpu_seconds": median(text.first for _, text in pairs),
        "total_cpu_seconds": median(text.total for _, text in pairs),
        "pairs": len(pairs),
        "later_tokens": max(thought.first_tokens - text.first_tokens for thought, text in pairs),
    }


def main(cfg: Config) -> None:
    """Measure and print."""
    check_at_least(1, pairs=cfg.pairs, tokens=cfg.tokens)
    costs = measure(cfg)
    result = figures(costs)
    rows = []
    for name, side in costs.items():
        first = median(cost.first for cost in side if cost.first)
        total = median(cost.total for cost in side)
        tokens = max(cost.first_tokens for cost in side)
        rows.append((name, f"{1e3 * first:.1f}", f"{1e3 * total:.1f}", tokens))
    ratios = (f"{result['first_ratio']:.4f}", f"{result['total_ratio']:.4f}", "")
    rows.append(("median of the ratios", *ratios))
    log(
        f"{result['pairs']} pairs of replies of {cfg.tokens} tokens, one thread, CPU ms of the server"
    )
    tables.show(("", "first delta", "whole reply", "tokens until the first delta, at most"), rows)
    tables.finish("thoughts", result)


if __name__ == "__main__":
    run(main, Config, __doc__)
