"""Flags that training scripts share.

A flag of type Free[...] changes how a run works, not what it learns: a run may resume with another value.
"""

from dataclasses import dataclass
from typing import Literal

from nanochat.common import Free as Free
from nanochat.nn.operations import Asked
from nanochat.runtime.parallel import Sharding
from nanochat.train.optim import Rates

Auto = Literal["auto"]


@dataclass(frozen=True)
class StageFlags(Rates):
    """Flags of every training script."""

    run: Free[str] = "dummy"
    """name of the wandb run that gets the figures too; dummy: no wandb"""
    device_type: Free[str] = ""
    """device to train on: npu, cuda or cpu; empty: the first of these that works"""
    data: Free[str | None] = None
    """corpus by name, the folder it was imported from, or a mixture such as web:0.7,books:0.3.
    default: the only corpus there is, or the parent's"""
    model_tag: Free[str | None] = None
    """folder of the checkpoints, such as d4; default: d and the depth for base, the newest tag for later stages"""
    save_every: Free[int] = 0
    """steps between checkpoints; 0: save by time and at the end only"""
    save_seconds: Free[float] = 60.0
    """seconds between checkpoints, longer where saving is slow; 0: never save by time"""
    keep: Free[int] = 3
    """number of newest checkpoints to keep; 0: keep all"""
    resume: Free[int | Literal["auto", "none"]] = "auto"
    """step to resume from; auto: the newest undamaged checkpoint; none: start again from step 0.
    Checkpoints after that step are moved aside"""
    other_code: Free[bool] = False
    """resume although the code has changed since the checkpoint was saved"""
    hang_seconds: Free[float] = 600.0
    """seconds without progress on one rank after which all ranks end; 0: wait for ever"""
    stop_at: Free[int | None] = None
    """step after which to save and stop; the same command without this flag resumes"""
    compile: Free[bool | None] = None
    """use torch.compile; default: wherever torch.compile works and pays"""
    kernels: Free[Asked] = "auto"
    """operators to compute with; auto: the fastest that the device has; plain: torch's.
    fused: the device's own fused operators; an error where there are none"""
    shard: Free[Sharding] = "grad"
    """what the ranks shard; none: nothing; grad: gradients and optimizer state (ZeRO-2).
    full: parameters too (ZeRO-3); take it when memory is short"""
    seed: int = 42
    """seed of the initial parameters, the order of rows and sampling"""
    profile: Free[bool] = False
    """time and trace ten steps, write tables and a trace to the folder profile beside the checkpoints, then continue"""


@dataclass(frozen=True)
class BatchFlags:
    """How the scripts that train on rows of tokens split a step."""

    total_batch_size: int | Auto = "auto"
    """tokens per step over all devices; auto: chosen by the length of the run and the corpus"""
    device_batch_size: Free[int | Auto] = "auto"
    """rows per pass on one device, at most; auto: as many as its memory holds.
    Lower it when memory runs out: what is learned stays the same"""
    gradient_accumulation_steps: Free[int | None] = None
    """passes per step; normally left out, since it follows from total_batch_size and device_batch_size"""


@dataclass(frozen=True)
class EpochFlags:
    """How long the stages after pretraining run, and their decay."""

    num_epochs: float = 1.0
    """passes over the training data"""
    num_iterations: int | None = None
    """number of steps; overrides num_epochs"""
    weight_decay: float = 0.0
    """decay of the matrices inside layers"""

    def steps(self, items: int, items_per_step: int) -> int:
        """The number of steps that the flags ask for."""
        return self.num_iterations or max(int(self.num_epochs * items) // items_per_step, 1)


@dataclass(frozen=True)
class ChatFlags(EpochFlags):
    """What the stages that learn from conversations read."""

    conversations: str | None = None
    """JSONL file of your own conversations, used instead of the corpus's mixture"""
