"""What bench.train and bench.multiplier measure: variants of training, each in its own process."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.processes import ROOT, Side, side, upstream_shape
from bench.text import ABOUT, ROWS, TOKEN_BYTES
from nanochat.common import read_json
from nanochat.gpt import GPTConfig

HELD_OUT = 64  # rows


@dataclass(frozen=True)
class Variant:
    """Whose code trains, in which number format, compiled or not."""

    side: str  # ours or upstream
    dtype: str
    compiled: bool = False
    scale: float = 1.0  # factor on upstream's learning rates
    flags: tuple[str, ...] = ()  # of base_train, for our side: rates, decay and schedule
    checkout: Path | None = None  # another checkout of this repository, whose code our side runs

    @property
    def name(self) -> str:
        """The variant in words."""
        compiled = "compiled" if self.compiled else "eager"
        return " ".join([self.side, compiled, self.dtype, *self.flags])


@dataclass(frozen=True)
class Plan:
    """The model, the rows and the length of a training."""

    shape: GPTConfig
    rows: Path  # a folder of bench.text.make_rows
    rows_per_step: int
    warmup: int = 3  # steps before the process is ready
    horizon: int | None = None  # steps of a run with its schedules; None: constant rates
    held_out: int = HELD_OUT  # rows at the end of the file that nothing trains on
    seed: int | None = None  # of weights and row order; None: 42, and the order of the file

    @property
    def tokens_per_step(self) -> int:
        """The tokens that one step trains on."""
        return self.rows_per_step * self.shape.sequence_len

    @property
    def epochs(self) -> float:
        """How often a run of `horizon` steps reads its rows."""
        train_rows = read_json(self.rows / ABOUT)["rows"] - self.held_out
        return (self.horizon or 0) * self.rows_per_step / train_rows


def flops_per_token(shape: GPTConfig) -> int:
    """Return the FLOPs of a token, forward and backward: of the large matrices, and of attention.

    The number depends on the shape alone, so it is the same for both sides: 31.46 million for D4.
    """
    width = shape.n_embd
    matrices = 12 * shape.n_layer * width**2 + shape.vocab_size * width
    keys = sum(min(window, shape.sequence_len) for window in shape.windows)
    return 6 * matrices + 12 * width * keys


@contextlib.contextmanager
def training(variant: Variant, plan: Plan, upstream: Path | None = None) -> Iterator[Side]:
    """Start the process of a variant, bench.train.side; it ends with the context."""
    home = variant.checkout or ROOT
    if variant.side == "upstream":
        assert upstream is not None
        home = upstream
    task: dict[str, Any] = {
        **asdict(variant),
        **asdict(plan),
        "checkout": str(home),
        # Its sizes alone, since another version of ours may lack a setting; side.py sets the rest.
        "shape": upstream_shape(plan.shape),
        "rows": str(plan.rows / ROWS),
        "token_bytes": str(plan.rows / TOKEN_BYTES),
        "epochs": plan.epochs,
    }
    variables = {"NANOCHAT_DTYPE": variant.dtype}
    if not variant.compiled:  # upstream compiles its optimizer unless this variable forbids it
        variables["TORCHDYNAMO_DISABLE"] = "1"
    with side(variant.name, "bench.train.side", task, home, **variables) as process:
        yield process
