"""Which chip this is."""

from torch_npu import _load


def get_soc_version() -> int:
    """The number of the chip's generation and variant, such as 223 for a 910B3."""
    return int(_load.emulated()["chip"]["soc"])
