"""The package that `import torch_npu` finds on an emulated NPU. It has only the names that the project uses.

The variable NANOCHAT_EMULATED_NPU, set by `python -m tests.emulated_npu`, says what to emulate.
"""

import os

# Like the real package: while this loads, torch must not load it a second time.
_autoload = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch  # noqa: E402

from torch_npu import _load  # noqa: E402

_emulator = _load.device()  # the compiled device, for the emulator's log.py

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
    npu_fusion_attention_v3,
    npu_incre_flash_attention,
    npu_prompt_flash_attention,
)
from torch_npu._operators import (  # noqa: E402
    npu_add_rms_norm,
    npu_apply_rotary_pos_emb,
    npu_clear_float_status,
    npu_get_float_status,
    npu_rms_norm,
    npu_rms_norm_backward,
    npu_rotary_mul,
)

_load.replace_scaled_dot_product_attention()

__version__ = _load.version()

__all__ = [
    "npu", "npu_add_rms_norm", "npu_apply_rotary_pos_emb", "npu_clear_float_status", "npu_fused_infer_attention_score",
    "npu_fusion_attention", "npu_fusion_attention_v3", "npu_get_float_status", "npu_incre_flash_attention",
    "npu_prompt_flash_attention", "npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", "profiler",
]  # fmt: skip
