"""Generates with karpathy/nanochat's engine in a process of its own; PYTHONPATH decides whose `nanochat` it imports.

The newest upstream has no server. Its last one kept one engine for each worker and answered one request at a time, so
this side calls that engine for one prompt after the other, and pays nothing for HTTP. The argument is the task as JSON;
each line of the input, prompts as JSON, is answered with CPU seconds, tokens, and seconds to each first token. Only
bench.serve starts this file.
"""

import json
import os
import sys
import time
from typing import Any

import torch


class Marks:
    """The part of a tokenizer that the engine asks for; no special token is ever generated."""

    def encode_special(self, text: str) -> int:
        """A number that no token has."""
        return -1

    def get_bos_token_id(self) -> int:
        """A number that no token has."""
        return -1


def make(shape: dict[str, Any]) -> Any:
    """Upstream's engine with a GPT of a shape and random weights."""
    from nanochat.engine import Engine
    from nanochat.gpt import GPT, GPTConfig

    torch.manual_seed(1)
    model: Any = GPT(GPTConfig(**shape))  # upstream's class, which the type checker cannot see
    model.init_weights()
    return Engine(model.eval(), Marks())  # type: ignore[arg-type]


def answer(engine: Any, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Generate for one prompt after the other, as a server does whose requests came all at once."""
    start, cpu, count, first = time.perf_counter(), time.process_time(), 0, []
    for prompt in prompts:
        for place, _ in enumerate(engine.generate(prompt, max_tokens=tokens, temperature=0.0)):
            if place == 0:
                first.append(time.perf_counter() - start)
            count += 1
    return {"seconds": time.process_time() - cpu, "tokens": count, "first_seconds": first}


def main() -> None:
    """Answer until the input ends; whatever upstream prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    engine = make(task["shape"])
    answer(engine, [[1, 2, 3]], 2)
    about = {"parameters": sum(parameter.numel() for parameter in engine.model.parameters())}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        print(
            json.dumps(answer(engine, json.loads(line), task["tokens"])), file=answers, flush=True
        )


if __name__ == "__main__":
    main()
