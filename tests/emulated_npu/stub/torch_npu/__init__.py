"""The package that `import torch_npu` finds on an emulated NPU: the names that the project uses, no more.

What it emulates is said in the variable NANOCHAT_EMULATED_NPU, which `python -m tests.emulated_npu` sets.
"""

import os

# As the real package does: while it loads, torch must not try to load it a second time.
_autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402

from torch_npu import _load  # noqa: E402

_emulator = _load.device()  # the compiled device; log.py of the emulator finds it here

torch.utils.rename_privateuse1_backend("npu")
from torch_npu import npu  # noqa: E402

_load.join_torch(npu)

if _autoload is None:
    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
else:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = _autoload

from torch_npu import profiler  # noqa: E402
from torch_npu._attention import (  # noqa: E402
    npu_fused_infer_attention_score,
    npu_fusion_attention,
    npu_incre_flash_attention,
    npu_prompt_flash_attention,
)
from torch_npu._operators import (  # noqa: E402
    npu_clear_float_status,
    npu_get_float_status,
    npu_rms_norm,
    npu_rotary_mul,
)

_load.replace_scaled_dot_product_attention()

__version__ = _load.version()

__all__ = [
    "npu", "npu_clear_float_status", "npu_fused_infer_attention_score", "npu_fusion_attention", "npu_get_float_status",
    "npu_incre_flash_attention", "npu_prompt_flash_attention", "npu_rms_norm", "npu_rotary_mul", "profiler",
]  # fmt: skip
