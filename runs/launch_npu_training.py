"""Fine-tunes Qwen on some cards of this host by the settings of a TOML file.

python runs/launch_npu_training.py --npus 8
python runs/launch_npu_training.py --npus 4 --config mine.toml --model ./Qwen3-0.6B --lora_rank=8
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


def read_flags(path: Path, given: list[str]) -> list[str]:
    """Return the flags of scripts.finetune that a TOML file asks for.

    Those that are also among the words of the command line (`given`) are left out, as the command
    line wins. SystemExit with one message if the file cannot be read or holds a table.
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as failure:
        sys.exit(
            tr(
                "error: {path} cannot be read as TOML: {failure}. Correct it, or name another file "
                "with --config",
                path=path,
                failure=in_words(failure),
            )
        )
    if tables := [name for name, value in settings.items() if isinstance(value, dict)]:
        sys.exit(
            tr(
                "error: {path} holds the table [{table}], and each setting must be a line of its "
                "own, such as max_length = 512. Remove the table's line",
                path=path,
                table=tables[0],
            )
        )
    overridden = {setting_of(word) for word in given if word.startswith("--")}
    flags: list[str] = []
    for name, value in settings.items():
        if setting_of(f"--{name}") not in overridden:
            flags += words_of(name, value)
    return flags


def setting_of(flag: str) -> str:
    """Return the setting of a flag in any spelling: `shard` for --shard=none and for --no-shard."""
    name = flag.removeprefix("--").partition("=")[0].replace("_", "-")
    return name.removeprefix("no-")


def words_of(name: str, value: Any) -> list[str]:
    """Return the words of a command line that give a setting its value."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def main() -> None:
    """Print the command that the settings make, and replace this process by it."""
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
    asked, given = parser.parse_known_args()
    if asked.npus < 1:
        mistake = tr("error: --npus must be at least 1, got {npus}", npus=asked.npus)
        parser.exit(2, f"{mistake}\n")
    flags = read_flags(asked.config, given) + given
    launcher = (
        ["-m", "nanochat.runtime.launch", f"--nproc_per_node={asked.npus}"]
        if asked.npus > 1
        else []
    )
    command = [
        sys.executable,
        *launcher,
        "-m",
        "scripts.finetune",
        *(["--"] if launcher else []),
        *flags,
    ]
    print("+", shlex.join(["python", *command[1:]]), flush=True)
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
