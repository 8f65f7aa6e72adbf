"""Predicts the time of a step, given the work of work.py and the rates of cards.py.

In a pass, the card does matmuls, attention and memory traffic one after another, while the host
launches operators, and the slower of the two decides. The optimizer and the exchange between cards
follow after the last pass. Only launches and computing are assumed to overlap, so several cards may
be slightly faster than predicted.
"""

import math
from dataclasses import dataclass

from nanochat.planner.cards import Rates
from nanochat.planner.work import Program, Size, attention_flops, matmul_flops, muon_flops


@dataclass(frozen=True)
class Pass:
    """The seconds of one forward and backward pass on one card, by kind of work."""

    matmul: float
    attention: float
    vector: float
    host: float

    @property
    def card(self) -> float:
        """The seconds for which the card computes."""
        return self.matmul + self.attention + self.vector

    @property
    def seconds(self) -> float:
        """The seconds until both the card and the host are done."""
        return max(self.card, self.host)

    @property
    def compute_bound(self) -> bool:
        """True if the card takes at least as long as the host."""
        return self.card >= self.host


@dataclass(frozen=True)
class Step:
    """The seconds of each part of a training step, and the number of tokens on all cards."""

    one_pass: Pass
    passes: int
    optimizer: float
    exchange: float
    tokens: int

    @property
    def seconds(self) -> float:
        """The seconds of the whole step."""
        return self.passes * self.one_pass.seconds + self.optimizer + self.exchange

    @property
    def tokens_per_second(self) -> float:
        """The number of tokens per second that all cards together train on."""
        return self.tokens / self.seconds


def pass_of(size: Size, rows: int, rates: Rates, program: Program) -> Pass:
    """Return the seconds that a pass over `rows` rows takes on one card, by kind of work."""
    tokens = rows * size.shape.sequence_len
    operators = program.layer_operators * size.shape.n_layer + program.pass_operators
    operators += program.exclusive_operators * size.shape.exclusive_layers
    # Some matmuls of a program run in fp32.
    seconds_per_flop = (1 - program.full) / rates.matmul + program.full / rates.full
    return Pass(
        matmul=tokens * matmul_flops(size) * seconds_per_flop,
        attention=tokens * attention_flops(size, program.shortest) / rates.attention,
        vector=program.traffic.of_pass(size, tokens) / rates.vector,
        host=operators * rates.launch,
    )


def exchange(size: Size, ranks: int, rates: Rates, program: Program) -> float:
    """Return the seconds that communication between cards takes in a step.

    The cards of a server share one copy of the model. Between servers, gradients are summed and
    Muon's orthogonalized matrices are gathered, and each card sends its share of both.
    """
    shards = min(ranks, rates.server)
    servers = math.ceil(ranks / shards)
    bytes_within = program.sent * size.parameters + program.muon_sent * size.matrices / shards
    bytes_within *= (shards - 1) / shards
    bytes_between = (8 * size.parameters + 2 * size.matrices) / shards
    bytes_between *= (servers - 1) / servers
    return bytes_within / rates.link + bytes_between / rates.network


def step_of(
    size: Size,
    rows: int,
    passes: int,
    ranks: int,
    rates: Rates,
    program: Program,
) -> Step:
    """Return the times of a step with `passes` passes over `rows` rows on each of `ranks` cards."""
    shards = min(ranks, rates.server)
    matmul = muon_flops(size) / ranks / rates.matmul
    vector = program.traffic.of_step(size) / shards / rates.vector
    host = program.step_operators * rates.launch
    return Step(
        one_pass=pass_of(size, rows, rates, program),
        passes=passes,
        optimizer=max(matmul + vector, host),
        exchange=exchange(size, ranks, rates, program),
        tokens=passes * rows * ranks * size.shape.sequence_len,
    )


def least_rows(size: Size, rates: Rates, program: Program) -> int:
    """Return the smallest number of rows, a power of two, for which a pass is compute-bound."""
    rows = 1
    while not pass_of(size, rows, rates, program).compute_bound:
        rows *= 2
    return rows
