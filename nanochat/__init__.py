"""The package: model, optimizers, data, engine, server."""

import os

# A torch_npu that is installed without CANN makes `import torch` itself raise. device.py imports it
# explicitly instead and keeps the reason if it fails, so it must not load by itself.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
