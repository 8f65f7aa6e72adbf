"""The names, memory and limits of each emulated chip, for the stub and the fake host."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One chip. get_device_name() returns `name`, and npu-smi prints `table` in its first column."""

    name: str
    soc: int  # what torch_npu's get_soc_version() returns
    table: str
    memory: int  # bytes
    bf16: bool
    fused_attention: bool  # has npu_fusion_attention and npu_fused_infer_attention_score
    saturates: bool  # an fp16 overflow gives the largest number instead of inf
    grouped_decode: bool  # npu_incre_flash_attention accepts fewer key heads than query heads
    lacks: tuple[str, ...] = ()  # operators that the chip has no kernel for, whatever its generation


FOR_INFERENCE = ("npu_fused_infer_attention_score", "npu_prompt_flash_attention", "npu_incre_flash_attention")

CHIPS = {
    "910A": Chip("Ascend910A", 102, "910A", 32 * GIB, False, False, True, True),
    "910B3": Chip("Ascend910B3", 223, "910B3", 64 * GIB, True, True, False, True),
    "910_93xx": Chip("Ascend910_9362", 255, "Ascend910", 64 * GIB, True, True, False, True),
    "310P": Chip("Ascend310P3", 202, "310P3", 21 * GIB, False, False, False, False),
    # What op-plugin's pages leave out for the 950 (its memory is invented: nobody may rely on a table's).
    "950": Chip(
        "Ascend950PR_9599", 260, "950PR", 48 * GIB, True, True, False, True,
        ("npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", *FOR_INFERENCE),
    ),
    # A chip that does not exist, for what the project does on one that it does not know.
    "SoC999": Chip(
        "Ascend999", 999, "999", 40 * GIB, True, False, False, True,
        ("npu_fusion_attention", "npu_rotary_mul", "npu_add_rms_norm", *FOR_INFERENCE),
    ),
}  # fmt: skip
DEFAULT = "910B3"
