"""Our step of RL, with the calls that scripts.chat_rl makes."""

import random
import zlib
from dataclasses import dataclass
from typing import Literal

from bench.training import Trainer, byte_tokenizer, random_model, spread_logits
from nanochat import device
from nanochat.data.conversation import Conversation, chat
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPTConfig
from nanochat.optim import Rates
from nanochat.rl import rollout
from nanochat.rl.groups import Groups
from nanochat.rl.policy import PolicyFlags
from nanochat.rl.sampler import Sampler

MODEL = GPTConfig(512, 4096, n_layer=4, n_head=3, n_kv_head=3, n_embd=192, window_pattern="L")
POLICY = PolicyFlags(overlong_tokens=1)  # so that replies that were cut off are trained on
RATE = 1e-6  # so that the replies of every step differ as those of the first


@dataclass(frozen=True)
class Shape:
    """The sizes of a step: by default those of the tinyworld preset's sums."""

    problems: int = 32
    samples: int = 16
    prompt: int = 14  # tokens of a prompt
    reply: int = 3  # tokens; the first has most of the entropy
    sharpness: float = 4.0  # deviation of the untrained model's logits
    temperature: float = 0.25  # of sampling
    pass_rows: int = 128  # replies per training pass

    @property
    def tokens(self) -> int:
        """Tokens of all replies of a step."""
        return self.problems * self.samples * self.reply


SUMS = Shape()


@dataclass
class Problems:
    """The prompts of a step as a task: random letters."""

    shape: Shape
    step: int = 0
    name: str = "random"
    kind: Literal["generative"] = "generative"

    def __len__(self) -> int:
        return self.shape.problems

    def __getitem__(self, i: int) -> Conversation:
        draw = random.Random(1000 * self.step + i)
        letters = draw.choices(range(32, 127), k=self.shape.prompt)
        return chat(bytes(letters).decode("latin-1"), "")

    def letters(self, i: int) -> tuple[str, ...]:
        """Return no letters to choose from."""
        return ()

    def grade(self, i: int, reply: str) -> float:
        """Return a reward that depends on the first character alone, and has no meaning."""
        return float(zlib.crc32(reply[:1].encode()) % 2)


class Ours:
    """A model, its sampler, and its optimizers, with replies computed as trees or as rows."""

    def __init__(self, shape: Shape, trees: bool):
        self.shape = shape
        self.compute = device.compute_init("cpu")
        model = random_model(MODEL, self.compute)
        spread_logits(model, shape.sharpness)
        self.trainer = Trainer(model, self.compute, Rates(), RATE)
        self.tokenizer = byte_tokenizer(MODEL.vocab_size)
        self.sampler = Sampler(model, self.compute)
        self.sampler.renew(model)
        self.groups = Groups(self.sampler.model, self.tokenizer) if trees else None
        self.task = Problems(shape)
        sampling = Sampling(shape.temperature, 50, shape.reply)
        self.practice = rollout.Practice(shape.samples, sampling, shape.pass_rows, POLICY)

    def step(self, number: int) -> None:
        """Make a step."""
        shape = self.shape
        trainer = self.trainer
        self.task.step = number
        rolled, samples = rollout.roll_out(
            self.task,
            range(shape.problems),
            self.practice.seeded(number),
            self.sampler.model,
            self.tokenizer,
            self.compute,
            self.groups,
        )
        rollout.sampler_gap(samples, trainer.model, self.compute)
        if rolled.num_targets:  # otherwise the step has nothing to learn from
            trainer.update(rolled)
        self.sampler.renew(trainer.model)
