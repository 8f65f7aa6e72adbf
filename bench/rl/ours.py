"""Our step of RL, with the calls that scripts.chat_rl makes, timed part by part."""

import time
from dataclasses import dataclass, field
from typing import Literal

import torch

from bench.rl.work import MODEL, Shape, prompts, right
from bench.serve.engine import tokenizer
from bench.updates import update
from nanochat import device
from nanochat.data.conversation import Conversation, chat
from nanochat.device import Compute
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT, GPTConfig
from nanochat.rl import rollout
from nanochat.rl.groups import Groups
from nanochat.rl.policy import PolicyFlags
from nanochat.rl.sampler import Sampler
from nanochat.step import Safeguards
from nanochat.train.optim import Optimizers, Rates

POLICY = PolicyFlags(overlong_tokens=1)  # so that replies that were cut off are trained on
RATE = 1e-6  # so that the replies of every step differ as those of the first


@dataclass
class Problems:
    """The prompts of a step as a task."""

    shape: Shape
    step: int = 0
    name: str = "random"
    kind: Literal["generative"] = "generative"

    def __len__(self) -> int:
        return self.shape.problems

    def __getitem__(self, i: int) -> Conversation:
        return chat(bytes(prompts(self.shape, self.step)[i]).decode("latin-1"), "")

    def letters(self, i: int) -> tuple[str, ...]:
        """No letters."""
        return ()

    def grade(self, i: int, reply: str) -> float:
        """By the first characters of the reply."""
        return right([ord(letter) for letter in reply], self.shape)


@dataclass
class Parts:
    """CPU seconds of a step's parts, by name."""

    seconds: dict[str, float] = field(default_factory=dict)
    _part: str = ""
    _start: float = 0.0

    def mark(self, part: str) -> None:
        """A part begins, and the one before it ends."""
        now = time.process_time()
        if self._part:
            self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._start
        self._part, self._start = part, now


class Ours:
    """A model, its sampler, and its optimizers."""

    def __init__(self, shape: Shape, trees: bool):
        self.shape, self.compute = shape, device.compute_init("cpu")
        self.words = tokenizer(MODEL["vocab_size"])
        self.model = _model(shape, self.compute)
        self.sampler = Sampler(self.model, self.compute)
        self.sampler.renew(self.model)
        self.groups = Groups(self.sampler.model, self.words) if trees else None
        roles, width = self.model.parameter_roles(), self.model.config.n_embd
        self.optimizers = Optimizers(self.model, roles, width, Rates(), RATE, self.compute.dtype)
        self.safeguards = Safeguards()
        self.task = Problems(shape)

    def step(self, number: int) -> dict[str, float]:
        """Take a step; CPU seconds of its parts."""
        self.task.step = number
        parts, shape = Parts(), self.shape
        sampling = Sampling(shape.temperature, 50, shape.reply, seed=number)
        parts.mark("sampling")
        rolled, samples = rollout.roll_out(
            self.task,
            range(shape.problems),
            shape.samples,
            sampling,
            shape.pass_rows,
            self.sampler.model,
            self.words,
            self.compute,
            POLICY,
            groups=self.groups,
        )
        parts.mark("gap")
        rollout.sampler_gap(samples, self.model, self.compute)
        if rolled.num_targets:  # otherwise the step has nothing to learn from
            update(
                self.model,
                self.optimizers,
                rolled,
                self.safeguards,
                self.compute,
                parts.mark,
            )
        parts.mark("copy")
        self.sampler.renew(self.model)
        parts.mark("")
        return parts.seconds


def _model(shape: Shape, compute: Compute) -> GPT:
    model = GPT(GPTConfig(**MODEL), compute.dtype, compute.operations)
    model.init_weights()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("c_proj.weight"):  # zero at the start, so that all gradients would be
                weight.copy_(
                    torch.randn(weight.shape, generator=generator) * model.config.n_embd**-0.5
                )
        head = model.lm_head.weight
        head.copy_(
            torch.randn(head.shape, generator=generator)
            * shape.sharpness
            * model.config.n_embd**-0.5
        )
    return model
