"""The programs, each run as `python -m scripts.NAME` or `torchrun -m scripts.NAME -- FLAGS`."""

import importlib.util
import os
import sys

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # see nanochat/__init__.py

if importlib.util.find_spec("torch") is None:  # then the packages that translate are missing too
    from tools_npu.lines import languages_of

    problems = {
        "en": f"error: {sys.executable} has no torch, so it is not the Python that nanochat was "
        "set up with. Type `source setup_ascend.sh` on an Ascend host, or `bash setup_env.sh` and "
        "`source .venv/bin/activate` elsewhere, then the same command again.",
        "zh": f"错误：{sys.executable} 里没有 torch，它不是安装 nanochat 时用的 Python。"
        "昇腾主机请执行 source setup_ascend.sh；其他机器请依次执行 bash setup_env.sh 和 "
        "source .venv/bin/activate。然后再输入同一条命令。",
    }
    for language in languages_of(os.environ):
        print(problems[language], file=sys.stderr)
    sys.exit(1)
