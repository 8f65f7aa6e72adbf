"""Estimates whether an uncompiled step is limited by launching operators or by computing them, and plans flags for it.

python -m nanochat.planner                            # flags of pretraining for the cards of this host
python -m nanochat.planner --chip 910B3 --ranks 8     # for other cards
python -m nanochat.planner --table                    # rows of a pass from which each chip is compute-bound

Without compilation Python launches every operator. If a pass holds too few tokens, the device waits for the host, and
more rows in a pass cost nothing. The flags are printed on one line, and the reason for them on standard error.
"""

import sys
from dataclasses import dataclass

import torch

from nanochat import device
from nanochat.common import UserError, run
from nanochat.gpt import GPT, GPTConfig
from nanochat.platforms.base import Chip
from nanochat.train import sizes

# Operators that reach the device with the fused kernels: python -m bench.npu_ops --layers, on the emulated NPU.
OPERATORS_PER_LAYER = 61.5  # forward and backward of one pass
OPERATORS_PER_PASS = 94.0  # embedding, head and loss
# Assumptions, to be replaced by `python check_npu.py --bench` on real cards.
LAUNCH_SECONDS = 12e-6  # of one operator, on the host
REACHED = 0.5  # the share of the peak that these matmuls reach, with the memory traffic between them


@dataclass(frozen=True)
class Pass:
    """How long one pass of some rows takes, forward and backward."""

    host_seconds: float
    device_seconds: float

    @property
    def compute_bound(self) -> bool:
        """Whether the device always has work."""
        return self.device_seconds >= self.host_seconds


def estimate(shape: GPTConfig, flops_per_token: int, rows: int, tflops: float) -> Pass:
    """Host time is operators times the cost of a launch; device time is FLOPs over the share of the peak reached."""
    operators = OPERATORS_PER_LAYER * shape.n_layer + OPERATORS_PER_PASS
    flops = float(flops_per_token) * rows * shape.sequence_len
    return Pass(operators * LAUNCH_SECONDS, flops / (REACHED * tflops * 1e12))


def least_rows(shape: GPTConfig, flops_per_token: int, tflops: float) -> int:
    """The fewest rows, a power of two, with which a pass is compute-bound."""
    rows = 1
    while not estimate(shape, flops_per_token, rows, tflops).compute_bound:
        rows *= 2
    return rows


def _model(depth: int, vocab_size: int) -> tuple[GPTConfig, int, int]:
    """The shape of a depth with upstream's context of 2,048, its FLOPs for a token, and its parameters."""
    head = 128 if depth >= 8 else 64
    dim = -(-depth * 64 // head) * head
    shape = GPTConfig(2048, vocab_size, depth, dim // head, dim // head, dim)
    with torch.device("meta"):
        model = GPT(shape)
    return shape, model.flops_per_token(), model.parameter_counts()["total"]


@dataclass(frozen=True)
class Config:
    """Flags for pretraining on Ascend cards, by their memory and speed."""

    depth: int = 12
    """layers"""
    total_batch_size: int = 262_144
    """tokens of a step over all cards"""
    vocab_size: int = 32_768
    """tokens of the vocabulary"""
    chip: str = ""
    """kind of card: 910A, 910B3, 910C, ...; default: the cards of this host"""
    ranks: int = 0
    """number of cards; default: all cards of this host"""
    table: bool = False
    """print a table for several depths: from how many rows of a pass each chip is compute-bound"""


def plan(cfg: Config, chip: Chip, ranks: int) -> str:
    """The flags for a number of cards; the reason for them goes to standard error."""
    if not chip.trains:
        raise UserError(f"{chip.name} cards are for inference only: train elsewhere, then chat here")
    shape, flops, parameters = _model(cfg.depth, cfg.vocab_size)
    unit = shape.sequence_len * ranks
    if cfg.total_batch_size % unit:
        raise UserError(
            f"total_batch_size must be a multiple of {unit:,} ({ranks} card(s) x {shape.sequence_len} tokens), got "
            f"{cfg.total_batch_size:,}",
            exit_code=2,
        )
    fit = sizes.rows_that_fit(chip.memory_gib * 2**30, shape, parameters)
    rows = min(fit, cfg.total_batch_size // unit)
    while cfg.total_batch_size // unit % rows:
        rows -= 1
    took = estimate(shape, flops, rows, chip.tflops)
    print(
        f"{chip.name} x {ranks}: {fit} rows fit {chip.memory_gib:.0f} GiB; a pass of {rows} takes the host about "
        f"{1000 * took.host_seconds:.0f} ms and the card {1000 * took.device_seconds:.0f} ms: "
        f"{'compute-bound' if took.compute_bound else 'bound by the host'} "
        f"(compute-bound from {least_rows(shape, flops, chip.tflops)} rows)",
        file=sys.stderr,
    )
    return f"--depth={cfg.depth} --total_batch_size={cfg.total_batch_size} --device_batch_size={rows}"


def table(vocab_size: int, depths: tuple[int, ...] = (4, 8, 12, 16, 20, 24, 32)) -> str:
    """A Markdown table: for each chip, the fewest rows of a pass that make it compute-bound, and the most that fit."""
    models = [_model(depth, vocab_size) for depth in depths]
    lines = [
        "| chip | TFLOP/s | " + " | ".join(f"d{depth}" for depth in depths) + " |",
        "| --- " * (len(depths) + 2) + "|",
    ]
    for chip in device.planned():
        if chip.trains:
            cells = [
                f"{least_rows(shape, flops, chip.tflops)} / "
                f"{sizes.rows_that_fit(chip.memory_gib * 2**30, shape, parameters)}"
                for shape, flops, parameters in models
            ]
            lines.append(f"| {chip.name} | {chip.tflops:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(cfg: Config) -> None:
    """Print the flags, or the table."""
    if cfg.table:
        print(table(cfg.vocab_size))
        return
    known = {chip.name: chip for chip in device.planned()}
    chip, ranks = known.get(cfg.chip), cfg.ranks
    if cfg.chip and chip is None:
        raise UserError(f"--chip must be one of {', '.join(known)}, got {cfg.chip!r}", exit_code=2)
    if chip is None or ranks < 1:
        found, count = device.cards()
        chip, ranks = chip or found, ranks or count
    if chip is None:
        raise UserError(
            "this host has no card of a known kind; name a kind with --chip and a number of cards with --ranks"
        )
    print(plan(cfg, chip, max(ranks, 1)))


if __name__ == "__main__":
    run(main, Config, __doc__)
