"""Convert checkpoints of karpathy/nanochat to this project's format.

python -m nanochat.checkpoint_manager convert DIR
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from nanochat.checkpoint_manager import upstream
from nanochat.common import log, tr
from nanochat.data.command_line import run


@dataclass(frozen=True)
class Config:
    """The command line: the verb `convert`, and the checkpoint to convert."""

    verb: Positional[Literal["convert"]]
    """The only action: convert."""
    folder: Positional[Path]
    """Folder of one tag, such as base_checkpoints/d20. The folder above it tells the stage."""
    step: int | None = None
    """Step to convert. Default: the newest."""
    tokenizer: Path | None = None
    """Folder of tokenizer.pkl. Default: `tokenizer` in the same base folder."""
    corpus: str = "fineweb"
    """Name of the corpus that the model was trained on. Later stages and evaluations use it."""


def main(cfg: Config) -> None:
    """Convert the checkpoint, and log the command that chats with it."""
    source = upstream.read_step(cfg.folder.expanduser(), cfg.step, cfg.tokenizer)
    folder = upstream.convert(source, cfg.corpus)
    next_command = f"python -m scripts.chat_cli -i {source.stage} -g {source.tag}"
    log(tr("converted: {folder}. Next: {command}", folder=folder, command=next_command))


if __name__ == "__main__":
    run(main, Config, __doc__)
