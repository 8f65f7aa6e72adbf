"""A table of Ascend chips by SoC version, and the names under which people know them.

The chip of a host is identified by its SoC version alone, because names mislead: `Ascend910B` is of
the first generation, `Ascend910B3` of the second. This module needs no torch.
"""

import re
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
    # The cards of a server form groups of so many, numbered in order; collectives join 1, 2, 4 or 8
    # cards, and fewer than 8 only within a group. 0: any cards.
    group: int = 0


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
        group=4,
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


# The training chips of the second generation. Atlas A2 servers were sold with several of them.
SECOND_GENERATION = ("910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1")
# Names that torch_npu, npu-smi and purchase orders use, as patterns for the whole name without the
# brand, blanks, hyphens and underscores, and the chips that they may mean. The first match counts.
# A chip's own name needs no row.
NAMES = (
    (r"910(premium|pro)a|910prob", ("910A",)),
    # torch_npu's Ascend910B is of the first generation, and everybody else's is of the second.
    (r"910b", (*SECOND_GENERATION, "910A")),
    # npu-smi calls both so: the first generation and the two dies of an Atlas A3.
    (r"910", ("910A", "910C")),
    (r"91093(\d\d|xx)?|910c\d*", ("910C",)),
    (r"310p\d?(v\d)?|310pro", ("310P",)),
    (r"310b\d?", ("310B",)),
    (r"950(pr|dt)?(95\w*)?|91095(\w\w)?", ("950",)),
    (r"a3|atlas\w*a3\w*", ("910C",)),
    (r"atlas(200i?|500)\w*a2|orangepi\w*", ("310B",)),
    (r"a2|atlas\w*a2\w*", SECOND_GENERATION),
    (r"atlas300[iv](pro|duo)|atlas300v", ("310P",)),
    (r"atlas(300t(pro)?|800|900(pod)?)(model)?(90[01]0)?", ("910A",)),
    (r"atlas(350|850|950)\w*", ("950",)),
)


def called(name: str) -> list[AscendChip]:
    """Return the chips that a name may mean: one, several if it is ambiguous, or none."""
    plain = re.sub(r"[\s_()（）-]+", "", name.lower())
    plain = re.sub(r"^(huawei|华为|ascend|昇腾|npu)+", "", plain)
    for chip in CHIPS:
        if plain == chip.name.lower().replace("-", ""):
            return [chip]
    for pattern, chip_names in NAMES:
        if re.fullmatch(pattern, plain):
            return [chip for chip in CHIPS if chip.name in chip_names]
    return []


def chip_of(soc: int) -> AscendChip | None:
    """Return the chip whose SoC version is `soc`, or None if it is not in the table."""
    for chip in CHIPS:
        if soc in chip.socs:
            return chip
    return None
