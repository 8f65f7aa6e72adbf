"""A table of Ascend chips by SoC version.

A chip is identified by its SoC version alone, because names mislead: `Ascend910B` is of the first
generation, `Ascend910B3` of the second. This module needs no torch.
"""

from dataclasses import dataclass
from typing import Literal

# Which operators a chip has. "fused": the fused operators of the second generation. "chunked": none
# of them, so attention is computed with matmuls over blocks of queries. "inference": the operators
# of inference cards. "listed": the operators that the chip's row in the table names, or that passed
# a test.
Kernels = Literal["fused", "chunked", "inference", "listed"]


@dataclass(frozen=True)
class AscendChip:
    """A family of chips, with its number formats, operators, peak and memory."""

    name: str
    socs: tuple[int, ...]  # torch.npu.get_soc_version()
    bf16: bool
    kernels: Kernels
    tflops: float  # dense fp16/bf16 peak of the unit with one device number; 0 if none is published
    source: str  # where the peak comes from
    memory_gib: float  # 0 if the device must be asked
    trains: bool = True  # inference cards lack every backward operator that matters
    # Whether an overflow gives the largest number instead of inf, and only sets a status flag.
    saturates: bool = False
    operators: tuple[str, ...] = ()  # names in torch_npu, if kernels is "listed"


# The operators that op-plugin's pages list for the Ascend 950 (the products table of each operator,
# August 2026). The pages do not list npu_rms_norm, npu_rotary_mul or
# npu_fused_infer_attention_score, and op-plugin's C++ refuses a 310P's operators on this chip.
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
    # torch_npu reports bf16 for every SoC from 220 on, including this inference chip, but CANN's
    # pages list only fp16.
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
    """Return the chip whose SoC version is `soc`, or None if it is not in the table."""
    for chip in CHIPS:
        if soc in chip.socs:
            return chip
    return None
