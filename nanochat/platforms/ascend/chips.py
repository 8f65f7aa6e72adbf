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
    # An overflow gives the largest number instead of inf; only a status flag then shows it.
    saturates: bool = False
    operators: tuple[str, ...] = ()  # of torch_npu, where kernels is "listed"


# What op-plugin's pages list for the Ascend 950 (products table of each operator, August 2026). They do not list
# npu_rms_norm, npu_rotary_mul or npu_fused_infer_attention_score, and its C++ refuses the operators of a 310P there.
OPERATORS_950 = ("npu_fusion_attention", "npu_add_rms_norm", "npu_apply_rotary_pos_emb")

CHIPS = (
    AscendChip(
        "910A",
        socs=tuple(range(100, 105)),
        bf16=False,
        kernels="chunked",
        tflops=256,
        source="data sheet, fp16",
        memory_gib=32,
        saturates=True,
    ),
    AscendChip(
        "310P",
        socs=tuple(range(200, 206)),
        bf16=False,
        kernels="inference",
        tflops=70,
        source="estimate, fp16",
        memory_gib=24,
        trains=False,
    ),
    AscendChip(
        "910B1",
        socs=(220,),
        bf16=True,
        kernels="fused",
        tflops=379,
        source="estimate from cores and clock, bf16",
        memory_gib=64,
    ),
    AscendChip(
        "910B2",
        socs=(221,),
        bf16=True,
        kernels="fused",
        tflops=376,
        source="data sheet, bf16",
        memory_gib=64,
    ),
    AscendChip(
        "910B2C",
        socs=(222,),
        bf16=True,
        kernels="fused",
        tflops=354,
        source="estimate from cores and clock, bf16",
        memory_gib=64,
    ),
    AscendChip(
        "910B3",
        socs=(223,),
        bf16=True,
        kernels="fused",
        tflops=313,
        source="data sheet, bf16",
        memory_gib=64,
    ),
    AscendChip(
        "910B4",
        socs=(224,),
        bf16=True,
        kernels="fused",
        tflops=280,
        source="data sheet, bf16",
        memory_gib=32,
    ),
    AscendChip(
        "910B4-1",
        socs=(225,),
        bf16=True,
        kernels="fused",
        tflops=270,
        source="estimate from cores and clock, bf16",
        memory_gib=64,
    ),
    # torch_npu says of every SoC from 220 on that it has bf16, of this inference chip too; CANN's
    # pages list fp16 only.
    AscendChip(
        "310B",
        socs=tuple(range(240, 244)),
        bf16=False,
        kernels="listed",
        tflops=0,
        source="none is published",
        memory_gib=0,
        trains=False,
    ),
    AscendChip(
        "910C",
        socs=tuple(range(250, 257)),
        bf16=True,
        kernels="fused",
        tflops=376,
        source="data sheet, bf16, one die",
        memory_gib=64,
    ),
    AscendChip(
        "950",
        socs=(260,),
        bf16=True,
        kernels="listed",
        tflops=0,
        source="none is published for bf16",
        memory_gib=0,
        operators=OPERATORS_950,
    ),
)


def chip_of(soc: int) -> AscendChip | None:
    """Return the chip of a SoC version, or None for a version that is not in the table."""
    for chip in CHIPS:
        if soc in chip.socs:
            return chip
    return None
