"""A checkpoint as a folder that Hugging Face transformers loads without a network, tokenizer included.

python -m nanochat.export ~/my-model
python -m nanochat.export ~/my-model --source base --model_tag d12 --dtype bfloat16
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from nanochat import device
from nanochat.checkpoint_manager.load import load_model
from nanochat.common import log, run
from nanochat.export.huggingface import export


@dataclass(frozen=True)
class Config:
    """Export a checkpoint for Hugging Face transformers."""

    folder: Positional[Path]
    """folder to make"""
    source: Literal["base", "mid", "sft", "rl"] | None = None
    """stage; default the latest of rl, sft, mid, base"""
    model_tag: str | None = None
    """default the newest"""
    step: int | None = None
    """default the newest"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """format of the weights"""


def main(cfg: Config) -> None:
    """Load, write, and say how to load it."""
    compute = device.compute_init("cpu")
    loaded = load_model(cfg.source, cfg.model_tag, cfg.step, compute, dtype=device.MASTER)
    folder = cfg.folder.expanduser()
    export(loaded, folder, cfg.dtype)
    log(f"exported stage {loaded.stage}, tag {loaded.tag}, step {loaded.step:,} to {folder}; its README.md says how to "
        "load it")  # fmt: skip


if __name__ == "__main__":
    run(main, Config, __doc__)
