"""The nanochat package: models, optimizers, training data, text generation and a chat server."""

import os

__version__ = "1.1.0"  # the one place: pyproject.toml, --version, reports and the server read it

# If torch_npu is installed without CANN, loading it automatically would make `import torch` raise.
# So automatic loading is off: the Ascend platform imports torch_npu itself, and keeps the reason if
# that fails.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
