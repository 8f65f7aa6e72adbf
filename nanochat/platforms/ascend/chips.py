"""Ascend chips by SoC version; needs no torch.

A chip is known by its SoC version alone. Names mislead: `Ascend910B` is of the first generation, `Ascend910B3` of the
second.
"""

from dataclasses import dataclass
from typing import Literal

# Which operators a chip has: "fused" are the fused operators of the second generation; "chunked" is a chip without
# them, so that attention is made of matmuls over blocks of queries; "inference" are the operators of inference cards;
# "listed" is a chip whose row, or whose trial, names each operator.
Kernels = Literal["fused", "chunked", "inference", "listed"]


@dataclass(frozen=True)
class AscendChip:
    """A family of chips: its number format, its operators, its peak. What is 0 is asked of the device instead."""

    name: str
    socs: tuple[int, ...]  # torch.npu.get_soc_version()
    bf16: bool
    kernels: Kernels
    tflops: float  # dense fp16/bf16 peak of what one device number stands for; 0 where none is published
    source: str  # of the peak
    memory_gib: float
    trains: bool = True  # inference cards lack every backward operator that matters
    saturates: bool = False  # an overflow gives the largest number instead of inf; only a status flag then shows it
    operators: tuple[str, ...] = ()  # of torch_npu, where kernels is "listed"


# What op-plugin's pages list for the Ascend 950 (products table of each operator, August 2026). They do not list
# npu_rms_norm, npu_rotary_mul or npu_fused_infer_attention_score, and its C++ refuses the operators of a 310P there.
OPERATORS_950 = ("npu_fusion_attention", "npu_add_rms_norm", "npu_apply_rotary_pos_emb")

CHIPS = (
    AscendChip(
        "910A",
        tuple(range(100, 105)),
        False,
        "chunked",
        256,
        "data sheet, fp16",
        32,
        saturates=True,
    ),
    AscendChip(
        "310P", tuple(range(200, 206)), False, "inference", 70, "estimate, fp16", 24, trains=False
    ),
    AscendChip("910B1", (220,), True, "fused", 379, "estimate from cores and clock, bf16", 64),
    AscendChip("910B2", (221,), True, "fused", 376, "data sheet, bf16", 64),
    AscendChip("910B2C", (222,), True, "fused", 354, "estimate from cores and clock, bf16", 64),
    AscendChip("910B3", (223,), True, "fused", 313, "data sheet, bf16", 64),
    AscendChip("910B4", (224,), True, "fused", 280, "data sheet, bf16", 32),
    AscendChip("910B4-1", (225,), True, "fused", 270, "estimate from cores and clock, bf16", 64),
    # torch_npu says of every SoC from 220 on that it has bf16, of this inference chip too; CANN's pages list fp16 only.
    AscendChip(
        "310B", tuple(range(240, 244)), False, "listed", 0, "none is published", 0, trains=False
    ),
    AscendChip("910C", tuple(range(250, 257)), True, "fused", 376, "data sheet, bf16, one die", 64),
    AscendChip(
        "950", (260,), True, "listed", 0, "none is published for bf16", 0, operators=OPERATORS_950
    ),
)


def chip_of(soc: int) -> AscendChip | None:
    """The chip of a SoC version, or None for a version that is not in the table."""
    return next((chip for chip in CHIPS if soc in chip.socs), None)
