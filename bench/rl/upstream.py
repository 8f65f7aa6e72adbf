"""The step of RL of a checkout of karpathy/nanochat, in a process of its own whose PYTHONPATH names the checkout.

The first argument is the name of a shape. The process prints a line when it is ready, and then answers each line of its
input, the number of a step, with a line of JSON: CPU seconds of the parts. Only bench.rl starts this file.
"""

import json
import os
import sys
import time
from typing import Any

import torch

sys.path.append(
    os.path.dirname(os.path.abspath(__file__))
)  # behind the checkout, which has no module of this name


class Words:
    """A tokenizer for a model that nobody reads; special tokens are the last of the vocabulary."""

    names = (
        "<|bos|>",
        "<|assistant_end|>",
        "<|python_start|>",
        "<|python_end|>",
        "<|output_start|>",
        "<|output_end|>",
    )

    def __init__(self, vocab: int):
        self.vocab = vocab

    def encode_special(self, name: str) -> int:
        """The number of a special token."""
        return self.vocab - 1 - self.names.index(name)

    def get_bos_token_id(self) -> int:
        """The token that begins a text."""
        return self.encode_special("<|bos|>")

    def encode(self, text: str) -> list[int]:
        """One token for each character."""
        return [ord(letter) % 256 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        """One character for each token."""
        return "".join(map(chr, tokens))


class Upstream:
    """A model, its engine and its optimizer, with the calls that upstream's chat_rl makes."""

    def __init__(self, shape: Any, model: dict[str, Any]):
        from nanochat.engine import Engine
        from nanochat.gpt import GPT, GPTConfig

        self.shape = shape
        self.model: Any = GPT(GPTConfig(**model))
        self.model.init_weights()
        words: Any = Words(model["vocab_size"])
        self.engine: Any = Engine(self.model, words)
        self.optimizer = self.model.setup_optimizer()
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * 1e-6

    def step(self, number: int, prompts: list[list[int]], right: Any) -> dict[str, float]:
        """Take a step; CPU seconds of its parts."""
        shape, seconds = self.shape, {"sampling": 0.0, "training": 0.0, "optimizer": 0.0}
        for at, prompt in enumerate(prompts):
            start = time.process_time()
            self.model.eval()
            replies: list[list[int]] = []
            for part in range(shape.samples // shape.pass_rows):
                found, _ = self.engine.generate_batch(
                    list(prompt),
                    num_samples=shape.pass_rows,
                    max_tokens=shape.reply,
                    temperature=shape.temperature,
                    top_k=50,
                    seed=hash((number, at, part)) & 0x7FFFFFFF,
                )
                replies += found
            rewards = torch.tensor([right(reply[len(prompt) :], shape) for reply in replies])
            sampled = time.process_time()
            seconds["sampling"] += sampled - start
            longest = max(map(len, replies))
            ids = torch.tensor([reply + [0] * (longest - len(reply)) for reply in replies])
            targets = ids[:, 1:].clone()
            targets[:, : len(prompt) - 1] = -1
            for row, reply in enumerate(replies):
                targets[row, len(reply) - 1 :] = -1
            advantages = rewards - rewards.mean()
            self.model.train()
            for first in range(0, len(replies), shape.pass_rows):
                rows = slice(first, first + shape.pass_rows)
                logp = -self.model(ids[rows, :-1], targets[rows], loss_reduction="none").view_as(
                    ids[rows, :-1]
                )
                loss = -(logp * advantages[rows, None]).sum() / (targets[rows] >= 0).sum().clamp(
                    min=1
                )
                loss.backward()
            seconds["training"] += time.process_time() - sampled
        start = time.process_time()
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        seconds["optimizer"] = time.process_time() - start
        return seconds


def main() -> None:
    """Answer steps until the input ends."""
    import work  # pyright: ignore[reportMissingImports]  # beside this file

    torch.set_num_threads(1)
    shape = {one.name: one for one in (work.SUMS, work.GSM8K)}[sys.argv[1]]
    side = Upstream(shape, work.MODEL)
    print("ready", flush=True)
    for line in sys.stdin:
        number = int(line)
        print(json.dumps(side.step(number, work.prompts(shape, number), work.right)), flush=True)


if __name__ == "__main__":
    main()
