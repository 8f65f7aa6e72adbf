"""The programs, each run as `python -m scripts.NAME` or `torchrun -m scripts.NAME -- FLAGS`."""

import importlib.util
import os
import sys

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # see nanochat/__init__.py

if importlib.util.find_spec("torch") is None:  # so nanochat.common cannot be imported either
    variables = ("NANOCHAT_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    language = next(filter(None, map(os.environ.get, variables)), "C")
    if not language.lower().startswith("zh"):
        print(
            f"error: {sys.executable} has no torch, so it is not the Python of nanochat's "
            "environment. In this terminal, source the set-up script of your device again, or "
            ".venv/bin/activate; README.md has the commands. Then type the same command again.",
            file=sys.stderr,
        )
    if language.lower().startswith("zh") or language.partition(".")[0] in ("C", "POSIX"):
        print(
            f"错误：{sys.executable} 里没有 torch，它不是 nanochat 环境里的 Python。请在当前终端里重新 "
            "source 安装时用的脚本，或者 source .venv/bin/activate（命令见 README.zh.md），"
            "然后再输入同一条命令。",
            file=sys.stderr,
        )
    sys.exit(1)
