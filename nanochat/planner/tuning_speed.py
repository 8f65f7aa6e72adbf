"""Predicts the time of fine-tuning, from the work of a step and the rates of cards.py.

As in roofline.py, the card does matmuls, attention and memory traffic one after another while the
host launches operators, and the slower of the two decides. Communication is added to that.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

import torch

from nanochat.models.lora import LoraConfig, adapts_experts, add_adapters
from nanochat.models.nf4 import BITS
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.planner.cards import Rates
from nanochat.planner.forecast import Memory, Tuning
from nanochat.planner.programs import COMPILED, FUSED, program_of
from nanochat.planner.work import Program, Traffic
from nanochat.train.tuning_rules import MOST_STEP_ROWS

ADAM_BYTES = 28  # that AdamW moves in a step, for each trained parameter
ADAM_OPERATORS = 60
# What dequantising a matrix from 4 bits moves for each weight, and the operators that it launches:
# codes, their integers, the two weights of a pair, scaled weights. Read from models/nf4.py.
NF4_BYTES = 13
NF4_OPERATORS = 16
MATRICES = 7  # matrices of a layer
FORWARD = 1 / 3  # the share of a pass that its forward pass moves and launches
# What a pass moves and launches with fused kernels, by whether an adapter is trained and whether
# layers are computed again. Counted on the emulated 910B3; dev/LOG.md has the command.
COUNTED: Mapping[tuple[bool, bool], Program] = MappingProxyType(
    {
        (adapter, recomputes): Program(
            Traffic(
                stream=stream,
                ends=115,
                logits=logits,
                head=0,
                matrix=matrix,
                table=0,
                matrix_step=0,
                table_step=0,
            ),
            layer_operators=operators,
            pass_operators=65,
            step_operators=ADAM_OPERATORS,
        )
        for adapter, recomputes, stream, matrix, logits, operators in (
            (True, False, 256, 0, 42, 157),
            (True, True, 322, 0, 42, 211),
            (False, False, 209, 22, 56, 92),
            (False, True, 285, 26, 56, 125),
        )
    }
)


@dataclass(frozen=True)
class Counts:
    """The numbers of entries that decide the work of a pass."""

    matrices: int  # in layers, without adapters
    active: int  # the parameters that a token passes through
    head: int
    trained: int
    active_trained: int
    total: int


@cache
def counts_of(shape: QwenConfig, lora: LoraConfig | None) -> Counts:
    """Return the counts of a model, whose adapters, if any, are all that is trained."""
    with torch.device("meta"):
        model = Qwen(shape)
    counts = model.parameter_counts()
    idle = counts["total"] - counts["active"]  # in the experts of other tokens
    if lora:
        add_adapters(model, lora)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    idle_trained = model.parameter_counts()["total"] - model.parameter_counts()["active"]
    if lora:
        idle_trained -= idle
    return Counts(
        matrices=counts["matrix"],
        active=counts["matrix"] - idle,
        head=shape.vocab_size * shape.n_embd,
        trained=trained,
        active_trained=trained - idle_trained,
        total=counts["total"],
    )


def matmul_flops(tuning: Tuning) -> int:
    """Return the FLOPs per token of a pass's matmuls with weights.

    An entry costs 2 in the forward pass, 2 for the gradient of the layer's input and, if the entry
    is trained, 2 for its own gradient. Computing a layer again costs 2 more. Of the experts, only
    those count that a token passes through.
    """
    counts = counts_of(tuning.shape, tuning.lora)
    again = 2 if tuning.checkpoint_activations else 0
    if tuning.lora:
        adapters = (6 + again) * counts.active_trained
        return (4 + again) * counts.active + 4 * counts.head + adapters
    return (6 + again) * counts.active + 6 * counts.head


def attention_flops(tuning: Tuning) -> float:
    """Return the FLOPs per token of a pass's attention over rows without borders.

    There are two matmuls in the forward pass and five in the backward pass. A token sees half of
    its row, or less where the row holds several conversations. A device that masks computes the
    scores outside a sliding window too.
    """
    shape = tuning.shape
    matmuls = 9 if tuning.checkpoint_activations else 7
    channels = shape.n_head * shape.head_dim
    layers = len(shape.windows)
    return matmuls * 2 * channels * layers * shape.sequence_len / 2


def expert_operators(tuning: Tuning) -> int:
    """Return how many matmuls of single experts a pass launches, which dense layers do not have.

    An expert has two matrices, and each of them two factors of an adapter, if they are adapted. A
    matrix is multiplied once forward, once for the gradient of its input, and if it is trained once
    for its own.
    """
    shape = tuning.shape
    matmuls = 2 * 3
    forward = 2
    if tuning.lora:
        matmuls = 2 * 2
        if adapts_experts(tuning.lora.targets):
            matmuls += 4 * 3
            forward += 4
    if tuning.checkpoint_activations:
        matmuls += forward
    tokens = tuning.rows * shape.sequence_len
    busy = min(shape.n_experts, tokens * shape.experts_per_token)
    return matmuls * busy * shape.mlp_kinds.count("E")


def program_for(tuning: Tuning, chip: str) -> Program:
    """Return what a pass moves and launches on the kind of card called `chip`.

    Cards whose kernels differ from the counted ones move and launch as much more as they do in
    pretraining.
    """
    base = program_of(chip)
    if base is COMPILED:
        return base
    counted = COUNTED[tuning.lora is not None, tuning.checkpoint_activations]
    stream = counted.traffic.stream + base.traffic.stream - FUSED.traffic.stream
    return replace(
        counted,
        traffic=replace(counted.traffic, stream=stream),
        layer_operators=counted.layer_operators + base.layer_operators - FUSED.layer_operators,
        pass_operators=counted.pass_operators + base.pass_operators - FUSED.pass_operators,
    )


@dataclass(frozen=True)
class TuningStep:
    """The seconds of the parts of a step, and its tokens over all cards."""

    one_pass: float
    passes: int
    gather: float  # in each pass, for parameters that are sharded
    update: float  # the optimizer, and the exchange of gradients and parameters
    reference: float  # a forward pass by the reference of DPO, in each pass
    tokens: int

    @property
    def seconds(self) -> float:
        """The seconds of the step, without the reference of DPO, which is computed beforehand."""
        return self.passes * (self.one_pass + self.gather) + self.update

    def hours(self, tokens: float, preferences: bool = False) -> float:
        """Return the hours for `tokens` tokens, where `preferences` adds DPO's reference."""
        seconds = self.seconds
        if preferences:
            seconds += self.passes * (self.reference + self.gather / 2)
        return tokens / self.tokens * seconds / 3600


def step_of(tuning: Tuning, rows_of_step: int, rates: Rates, program: Program) -> TuningStep:
    """Return the times of a step with `rows_of_step` rows on each rank."""
    shape = tuning.shape
    counts = counts_of(shape, tuning.lora)
    tokens = tuning.rows * shape.sequence_len
    traffic = program.traffic
    channels = (traffic.stream * shape.n_layer + traffic.ends) * shape.n_embd
    moved = tokens * (channels + traffic.logits * shape.vocab_size)
    if tuning.lora is None:
        moved += traffic.matrix * (counts.matrices + counts.head)
    operators = program.layer_operators * shape.n_layer + program.pass_operators
    operators += expert_operators(tuning)
    if tuning.base_bits == BITS:  # in the forward and in the backward pass
        times = 3 if tuning.checkpoint_activations else 2
        moved += times * NF4_BYTES * counts.matrices
        operators += times * NF4_OPERATORS * MATRICES * shape.n_layer

    matmul = tokens * matmul_flops(tuning) / rates.matmul
    attention = tokens * attention_flops(tuning) / rates.attention
    vector = moved / rates.vector
    host = operators * rates.launch
    forward = tokens * 2 * (counts.active + counts.head) / rates.matmul
    forward += attention * 2 / 7 + vector * FORWARD

    shards = min(tuning.ranks, rates.server)
    servers = math.ceil(tuning.ranks / shards)
    remote_share = (shards - 1) / shards
    gather = 0.0
    if tuning.shard == "full":  # in 16 bits, before the forward and before the backward pass
        gather = 4 * counts.total * remote_share / rates.link
    exchange = 6 * counts.trained * remote_share / rates.link
    exchange += 8 * counts.trained / shards * (servers - 1) / servers / rates.network
    adam = ADAM_BYTES * counts.trained / shards / rates.vector
    passes = rows_of_step // tuning.rows
    return TuningStep(
        one_pass=max(matmul + attention + vector, host),
        passes=passes,
        gather=gather,
        update=max(adam, program.step_operators * rates.launch) + exchange,
        reference=max(forward, host * FORWARD),
        tokens=passes * tokens * tuning.ranks,
    )


def rows_of_step(ranks: int) -> int:
    """Return the rows that a rank has in a step, as fine-tuning chooses them on much data."""
    return max(MOST_STEP_ROWS // ranks, 1)


def with_fitting_rows(tuning: Tuning, memory: Memory, budget: float) -> Tuning:
    """Return the settings with the largest passes that surely fit `budget`, as the script tries it.

    `memory` is that of one row. More rows are taken to need as much again, except for the state.
    """
    all_rows = rows_of_step(tuning.ranks)
    rows = 1
    while all_rows % (2 * rows) == 0:
        if memory.state + 2 * rows * (memory.peak - memory.state) > budget:
            break
        rows *= 2
    return replace(tuning, rows=rows)
