"""Compares the roofline's predictions with pretraining runs that others have published.

Every run is described by what its code does. Upstream's code is compiled, while the two ports run
operator by operator and attend to the whole context. In the 910C runs, fp32 weights are multiplied
with bf16 activations without autocast, so that two of three matmuls run in fp32 (commit 60b5530 of
that port; aclnnMm promotes mixed formats).
"""

import math
from dataclasses import dataclass, replace

from nanochat import device
from nanochat.planner.cards import in_fp8, rates_of
from nanochat.planner.programs import COMPILED, COMPILED_FP8, PLAIN
from nanochat.planner.roofline import step_of
from nanochat.planner.work import Program, Size, Traffic, size_of
from nanochat.platforms.base import Chip

# The constants that were chosen to meet these runs. The others were measured by others or counted
# here, by hand for compiled code and for fp8; the shares of attention and the cost of a launch are
# estimates.
FITTED = ("SHAPES",)
VOCABULARY = 32_768


@dataclass(frozen=True)
class Run:
    """A published run: its model, cards and program, and the tokens per second that it reports."""

    who: str
    depth: int
    card: str
    ranks: int
    rows: int  # rows of a pass on one card
    passes: int
    program: Program
    tokens_per_second: float
    source: str
    pattern: str = "SSSL"
    eight_bits: bool = False
    flops: float = 0  # per token by the run's own code, if its windows differ from today's

    @property
    def chip(self) -> Chip:
        """The kind of card that the run used."""
        return next(chip for chip in device.planned() if chip.name == self.card)

    @property
    def size(self) -> Size:
        """The size of upstream's model at the run's depth."""
        return size_of(self.depth, VOCABULARY, self.pattern, upstream=True)

    def predicted(self) -> float:
        """Return the tokens per second that the roofline predicts."""
        rates = rates_of(self.chip)
        assert rates is not None, self.card
        if self.eight_bits:
            rates = in_fp8(rates)
        step = step_of(self.size, self.rows, self.passes, self.ranks, rates, self.program)
        return step.tokens_per_second

    def mfu(self, tokens_per_second: float) -> float:
        """Return the run's MFU at a speed of `tokens_per_second`, relative to the 16-bit peak.

        The FLOPs per token are those that the run's own code counts.
        """
        flops = self.flops or self.size.flops_per_token
        peak = self.ranks * self.chip.tflops * 1e12
        return tokens_per_second * flops / peak

    @property
    def off(self) -> float:
        """The relative error of the predicted tokens per second, positive if they are too high."""
        return self.predicted() / self.tokens_per_second - 1


# 8 bytes for a matrix entry and 4 for a table entry go through the links; a table is about half of
# the parameters.
PORT = replace(
    PLAIN,
    traffic=Traffic(
        stream=785, ends=297, logits=92, head=0, matrix=24, table=8, matrix_step=170, table_step=90
    ),
    sent=6.0,
    muon_sent=0.0,
    shortest=2048,
)
MIXED = replace(
    PORT, traffic=replace(PORT.traffic, stream=985, ends=208, logits=104, matrix=18), full=2 / 3
)
UPSTREAM = replace(COMPILED, sent=6.0, muon_sent=0.0)
HALF = replace(UPSTREAM, shortest=1024)  # in January 2026 a short window was half of the context
QUANTIZING = replace(UPSTREAM, traffic=COMPILED_FP8.traffic)

RUNS = (
    Run(
        who="liujin99",
        depth=24,
        card="910B3",
        ranks=8,
        rows=8,
        passes=8,
        program=PORT,
        tokens_per_second=9.5 * 729_810_240 / (13.8 * 3600),
        source="README: 13.8 h at ratio 9.5",
    ),
    Run(
        who="leideng",
        depth=20,
        card="910C",
        ranks=16,
        rows=8,
        passes=4,
        program=MIXED,
        tokens_per_second=8_703_180_800 / (494.05 * 60),
        source="report: 8,300 steps, 494.05 min",
        pattern="L",
    ),
    Run(
        who="leideng",
        depth=32,
        card="910C",
        ranks=16,
        rows=4,
        passes=16,
        program=MIXED,
        tokens_per_second=35_651_584_000 / (6096.86 * 60),
        source="report: 17,000 steps, 6,097 min",
        pattern="L",
    ),
    Run(
        who="upstream",
        depth=24,
        card="H100",
        ranks=8,
        rows=16,
        passes=2,
        program=HALF,
        tokens_per_second=16704 * 2**19 / 10949.5,
        source="LEADERBOARD run 1, bf16: 10,949 s",
        flops=4.330784e19 / (16704 * 2**19),
    ),
    Run(
        who="upstream",
        depth=24,
        card="H100",
        ranks=8,
        rows=16,
        passes=4,
        program=QUANTIZING,
        tokens_per_second=5568 * 2**20 / 5940,
        source="LEADERBOARD run 6, fp8: 1.65 h",
        eight_bits=True,
    ),
)


def spread() -> float:
    """Return the root mean square of the predictions' relative errors."""
    squares = [run.off**2 for run in RUNS]
    return math.sqrt(sum(squares) / len(squares))
