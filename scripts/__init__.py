"""The programs, each run as `python -m scripts.NAME` or `torchrun -m scripts.NAME -- FLAGS`."""

import os

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # see nanochat/__init__.py
