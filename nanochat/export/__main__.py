"""Export a checkpoint as a folder that Hugging Face transformers loads without a network, tokenizer included.

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
    """Folder to create. It must not exist yet."""
    source: Literal["base", "mid", "sft", "rl"] | None = None
    """Stage of the model. Default: the latest one, in the order rl > sft > mid > base."""
    model_tag: str | None = None
    """Tag of the model, such as d20. Default: the newest."""
    step: int | None = None
    """Step of the checkpoint. Default: the last."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights. bfloat16 and float16 halve the size of the folder."""


def main(cfg: Config) -> None:
    """Load a checkpoint, export it, and say where the instructions for loading it are."""
    compute = device.compute_init("cpu")
    loaded = load_model(cfg.source, cfg.model_tag, cfg.step, compute, dtype=device.MASTER)
    folder = cfg.folder.expanduser()
    export(loaded, folder, cfg.dtype)
    log(f"exported stage {loaded.stage}, tag {loaded.tag}, step {loaded.step:,} to {folder}: its README.md says how "
        "to load it")  # fmt: skip


if __name__ == "__main__":
    run(main, Config, __doc__)
