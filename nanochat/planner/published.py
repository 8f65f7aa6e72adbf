"""The runs that others have published, and what the roofline says of them.

Every run is described by what its code does: upstream's code runs compiled; the two ports run operator by operator and
attend to everything. In the 910C runs fp32 weights meet bf16 activations without autocast, so that two of three matmuls
run in fp32 (commit 60b5530 of that port; aclnnMm promotes mixed formats).
"""

import math
from dataclasses import dataclass, replace

from nanochat import device
from nanochat.planner.cards import SHAPES, rates_of
from nanochat.planner.programs import COMPILED, PLAIN
from nanochat.planner.roofline import step_of
from nanochat.planner.work import Program, Traffic, size_of
from nanochat.platforms.base import Chip

# The constants that were chosen to meet these runs. The others were measured by others or counted here, by hand for
# compiled code and for fp8; the shares of attention and the cost of a launch are estimates.
FITTED = ("SHAPES",)
EIGHT_BITS = (
    1402.6e12  # FLOP/s of the best fp8 matmul on an H100, from the table that RATINGS cites
)
QUANTIZED = (
    120.0  # bytes for each token, layer and channel: 18 tensors a layer scaled and cast to 8 bits
)


@dataclass(frozen=True)
class Run:
    """A published run: what was trained on what, and the tokens per second that follow from its report."""

    who: str
    depth: int
    card: str
    ranks: int
    rows: int  # of a pass on one card
    passes: int
    program: Program
    tokens_per_second: float
    source: str
    pattern: str = "SSSL"
    eight_bits: bool = False
    flops: float = 0  # that the run's code counts for a token, where its windows were not today's

    @property
    def chip(self) -> Chip:
        """The kind of card."""
        return next(chip for chip in device.planned() if chip.name == self.card)

    def predicted(self) -> float:
        """Tokens per second by the roofline."""
        rates = rates_of(self.chip)
        assert rates is not None, self.card
        rates = replace(rates, matmul=SHAPES * EIGHT_BITS) if self.eight_bits else rates
        size = size_of(self.depth, 32_768, self.pattern, upstream=True)
        return step_of(
            size, self.rows, self.passes, self.ranks, rates, self.program
        ).tokens_per_second

    def mfu(self, tokens_per_second: float) -> float:
        """The share of the 16-bit peak, with the FLOPs that the run's own code counts."""
        flops = (
            self.flops or size_of(self.depth, 32_768, self.pattern, upstream=True).flops_per_token
        )
        return tokens_per_second * flops / (self.ranks * self.chip.tflops * 1e12)

    @property
    def off(self) -> float:
        """How far the prediction is off, as a share of what was published."""
        return self.predicted() / self.tokens_per_second - 1


# 8 bytes for a matrix entry and 4 for a table entry go through the links; a table is about half of the parameters.
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
QUANTIZING = replace(
    UPSTREAM, traffic=replace(UPSTREAM.traffic, stream=UPSTREAM.traffic.stream + QUANTIZED)
)

RUNS = (
    Run(
        "liujin99",
        24,
        "910B3",
        8,
        8,
        8,
        PORT,
        9.5 * 729_810_240 / (13.8 * 3600),
        "README: 13.8 h at ratio 9.5",
    ),
    Run(
        "leideng",
        20,
        "910C",
        16,
        8,
        4,
        MIXED,
        8_703_180_800 / (494.05 * 60),
        "report: 8,300 steps, 494.05 min",
        "L",
    ),
    Run(
        "leideng",
        32,
        "910C",
        16,
        4,
        16,
        MIXED,
        35_651_584_000 / (6096.86 * 60),
        "report: 17,000 steps, 6,097 min",
        "L",
    ),
    Run(
        "upstream",
        24,
        "H100",
        8,
        16,
        2,
        HALF,
        16704 * 2**19 / 10949.5,
        "LEADERBOARD run 1, bf16: 10,949 s",
        flops=4.330784e19 / (16704 * 2**19),
    ),
    Run(
        "upstream",
        24,
        "H100",
        8,
        16,
        4,
        QUANTIZING,
        5568 * 2**20 / 5940,
        "LEADERBOARD run 6, fp8: 1.65 h",
        eight_bits=True,
    ),
)


def spread() -> float:
    """The root mean square of the relative errors."""
    return math.sqrt(sum(run.off**2 for run in RUNS) / len(RUNS))
