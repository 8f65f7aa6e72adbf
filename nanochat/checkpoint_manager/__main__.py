"""Take over checkpoints of karpathy/nanochat.

python -m nanochat.checkpoint_manager convert DIR
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from nanochat.checkpoint_manager import upstream
from nanochat.common import log, run


@dataclass(frozen=True)
class Config:
    """Take over a checkpoint of karpathy/nanochat's HEAD: `convert` and its folder, such as base_checkpoints/d20."""

    verb: Positional[Literal["convert"]]
    """what to do"""
    folder: Positional[Path]
    """a tag's folder; the one above it tells the stage"""
    step: int | None = None
    """which step; default the newest"""
    tokenizer: Path | None = None
    """folder of tokenizer.pkl; default `tokenizer` of the same base folder"""
    corpus: str = "fineweb"
    """name of the corpus it was trained on, for later stages"""


def main(cfg: Config) -> None:
    """Convert, and say what to type next."""
    theirs = upstream.read(cfg.folder.expanduser(), cfg.step, cfg.tokenizer)
    where = upstream.convert(theirs, cfg.corpus)
    log(f"converted: {where}. Next: python -m scripts.chat_cli -i {theirs.stage} -g {theirs.tag}")


if __name__ == "__main__":
    run(main, Config, __doc__)
