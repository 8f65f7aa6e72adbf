"""Checkouts of karpathy/nanochat, or of a port of it, that benchmarks measure beside ours."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanochat.common import UserError
from nanochat.gpt import GPTConfig

PARTS = ("nanochat/gpt.py", "nanochat/optim.py")  # what every checkout of 2026 has


def shape_for(side: str, shape: GPTConfig) -> dict[str, Any]:
    """The fields of a shape for one side; karpathy/nanochat's GPTConfig has neither bigrams nor offset."""
    fields = asdict(shape)
    if side == "upstream":
        del fields["bigram_rows"], fields["offset_layers"]
    return fields


def check_checkout(flag: str, folder: Path) -> None:
    """Raise UserError, with exit code 2, where the folder given for `flag` is no checkout of 2026."""
    if not folder.is_dir():
        raise UserError(
            f"{flag} must name a folder with a checkout of karpathy/nanochat, got {folder}, which is no folder. "
            "Clone the repository, and give the folder of the clone.",
            exit_code=2,
        )
    missing = [name for name in PARTS if not (folder / name).is_file()]
    if missing:
        raise UserError(
            f"{flag} must name a checkout of karpathy/nanochat of 2026, got {folder}, which has no "
            f"{' and no '.join(missing)}. Give the folder that holds its README.",
            exit_code=2,
        )
