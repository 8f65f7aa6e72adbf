"""Fine-tunes Qwen on some cards of this host by the settings of a TOML file.

python runs/launch_npu_training.py --npus 8
python runs/launch_npu_training.py --npus 4 --config mine.toml --model ./Qwen3-0.6B --shard=none
"""

import os
import shlex
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanochat.common import tr  # noqa: E402
from nanochat.data.library_words import in_words  # noqa: E402
from tools_npu.flags import Parser  # noqa: E402

SETTINGS = Path(__file__).with_name("npu_train_config.toml")


def read_flags(path: Path, own_flags: list[str]) -> list[str]:
    """Return the flags of scripts.finetune that a TOML file sets and `own_flags` do not.

    Raises SystemExit with one message if the file cannot be read or holds a table.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        sys.exit(
            tr(
                "error: {path} cannot be read as TOML: {failure}. Correct it, or name another file "
                "with --config",
                path=path,
                failure=in_words(failure),
            )
        )
    tables = [name for name, value in settings.items() if isinstance(value, dict)]
    if tables:
        sys.exit(
            tr(
                "error: {path} holds the table [{table}], and each setting must be a line of its "
                "own, such as max_length = 512. Remove the table's line",
                path=path,
                table=tables[0],
            )
        )
    own_names = set()
    for word in own_flags:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--").replace("_", "-")
            own_names.add(name)
            own_names.add(name.removeprefix("no-"))
    flags = []
    for name, value in settings.items():
        if name.replace("_", "-") not in own_names:
            flags += as_flag(name, value)
    return flags


def as_flag(name: str, value: Any) -> list[str]:
    """Return a setting as words of a command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def main() -> None:
    """Print the command of the training, and replace this process by it."""
    about = tr(
        "Fine-tunes Qwen on some cards of this host by the settings of a TOML file. Other flags go "
        "to scripts.finetune."
    )
    description = f"{about}\n\n{(__doc__ or '').split(chr(10) * 2, 1)[1]}"
    parser = Parser("launch_npu_training.py", description)
    parser.flags.add_argument(
        "--npus", type=int, required=True, help=tr("number of cards; each gets a process")
    )
    parser.flags.add_argument(
        "--config",
        type=Path,
        default=SETTINGS,
        help=tr("file of settings; default: {file}", file=SETTINGS.name),
    )
    launch, own_flags = parser.parse_known_args()
    if launch.npus < 1:
        mistake = tr("error: --npus must be at least 1, got {npus}", npus=launch.npus)
        parser.exit(2, f"{mistake}\n")
    flags = [*read_flags(launch.config, own_flags), *own_flags]
    arguments = ["-m", "scripts.finetune", *flags]
    if launch.npus > 1:
        launcher = ["-m", "nanochat.runtime.launch", f"--nproc_per_node={launch.npus}"]
        arguments = [*launcher, "-m", "scripts.finetune", "--", *flags]
    print("+", shlex.join(["python", *arguments]), flush=True)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
