"""What each emulated chip is: the names, memory and limits that the stub and the pretended host show."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Chip:
    """One profile. `name` is what get_device_name() returns; `table` what npu-smi prints in its first column."""

    name: str
    soc: int  # torch_npu's get_soc_version()
    table: str
    memory: int  # bytes
    bf16: bool
    fused_attention: bool  # npu_fusion_attention and npu_fused_infer_attention_score exist
    saturates: bool  # fp16 overflow gives the largest number instead of inf
    grouped_decode: bool  # npu_incre_flash_attention takes fewer heads of keys than of queries


CHIPS = {
    "910A": Chip("Ascend910A", 102, "910A", 32 * GIB, False, False, True, True),
    "910B3": Chip("Ascend910B3", 223, "910B3", 64 * GIB, True, True, False, True),
    "910_93xx": Chip("Ascend910_9362", 255, "Ascend910", 64 * GIB, True, True, False, True),
    "310P": Chip("Ascend310P3", 202, "310P3", 21 * GIB, False, False, False, False),
}
DEFAULT = "910B3"
