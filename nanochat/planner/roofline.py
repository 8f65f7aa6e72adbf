"""How long a step takes: the work of work.py at the rates of cards.py.

A pass multiplies, attends and moves memory one after the other on the card, while the host launches operators; the
slower of the two decides. The optimizer and the exchange between cards come after the last pass. Nothing is assumed to
overlap but launches and computing, so several cards may do a little better.
"""

import math
from dataclasses import dataclass

from nanochat.planner.cards import Rates
from nanochat.planner.work import Program, Size, attention_flops, matmul_flops, muon_flops


@dataclass(frozen=True)
class Pass:
    """Seconds of one pass over some rows, forward and backward."""

    matmul: float
    attention: float
    vector: float
    host: float

    @property
    def card(self) -> float:
        """Seconds that the card computes."""
        return self.matmul + self.attention + self.vector

    @property
    def seconds(self) -> float:
        """Seconds until card and host are done."""
        return max(self.card, self.host)

    @property
    def compute_bound(self) -> bool:
        """Whether the card always has work."""
        return self.card >= self.host


@dataclass(frozen=True)
class Step:
    """Seconds of one optimizer update over all cards."""

    one_pass: Pass
    passes: int
    optimizer: float
    exchange: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.passes * self.one_pass.seconds + self.optimizer + self.exchange

    @property
    def tokens_per_second(self) -> float:
        """Tokens that all cards together train on in a second."""
        return self.tokens / self.seconds


def pass_of(size: Size, rows: int, rates: Rates, program: Program) -> Pass:
    """A pass of `rows` rows on one card."""
    tokens = rows * size.shape.sequence_len
    matmul = tokens * matmul_flops(size)
    operators = program.layer_operators * size.shape.n_layer + program.pass_operators
    return Pass(
        matmul=matmul * ((1 - program.full) / rates.matmul + program.full / rates.full),
        attention=tokens * attention_flops(size, program.shortest) / rates.attention,
        vector=program.traffic.of_pass(size, tokens) / rates.vector,
        host=operators * rates.launch,
    )


def exchange(size: Size, ranks: int, rates: Rates, program: Program) -> float:
    """Seconds of the collectives of a step.

    The cards of a server share one copy of the model. Between servers only gradients are summed, and the matrices that
    Muon has orthogonalized are gathered; each card sends its share of both.
    """
    shards = min(ranks, rates.server)
    servers = math.ceil(ranks / shards)
    within = (
        (shards - 1)
        / shards
        * (program.sent * size.parameters + program.muon_sent * size.matrices / shards)
    )
    between = (servers - 1) / servers * (8 * size.parameters + 2 * size.matrices) / shards
    return within / rates.link + between / rates.network


def step_of(size: Size, rows: int, passes: int, ranks: int, rates: Rates, program: Program) -> Step:
    """A step of `passes` passes of `rows` rows on each of `ranks` cards."""
    shards = min(ranks, rates.server)
    computed = (
        muon_flops(size) / ranks / rates.matmul
        + program.traffic.of_step(size) / shards / rates.vector
    )
    return Step(
        one_pass=pass_of(size, rows, rates, program),
        passes=passes,
        optimizer=max(computed, program.step_operators * rates.launch),
        exchange=exchange(size, ranks, rates, program),
        tokens=passes * rows * ranks * size.shape.sequence_len,
    )


def least_rows(size: Size, rates: Rates, program: Program) -> int:
    """The fewest rows, a power of two, with which a pass is compute-bound."""
    rows = 1
    while not pass_of(size, rows, rates, program).compute_bound:
        rows *= 2
    return rows
