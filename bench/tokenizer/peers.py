"""The sides of bench.tokenizer: installs peers, and asks a side to train or to encode in its own process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from nanochat.common import UserError, base_dir
from nanochat.tokenizer import PATTERNS

SIDE = Path(__file__).resolve().parent / "side.py"
Peer = Literal["rustbpe", "tokenizers", "tiktoken", "gigatoken"]
VERSIONS = {"rustbpe": "0.1.0", "tokenizers": "0.23.3", "tiktoken": "0.14.0", "gigatoken": "0.10.0"}
ENCODERS = ("rustbpe", "tokenizers", "tiktoken", "gigatoken")
NANOCHAT = PATTERNS["nanochat"]
GPT4 = NANOCHAT.replace("{1,2}", "{1,3}")  # gigatoken calls this pattern gpt4
Task = dict[str, Any]
Answer = dict[str, Any]


def peer_folder(peer: str) -> Path:
    """The folder of a peer; the peer is installed into it first if it is missing."""
    folder = base_dir() / "peers" / f"{peer}-{VERSIONS[peer]}"
    if (folder / "done").exists():
        return folder
    wanted = ["--quiet", "--target", str(folder), f"{peer}=={VERSIONS[peer]}"]
    said = ""
    for tool in (["uv", "pip", "install", "--python", sys.executable], ["pip", "install"]):
        result = subprocess.run(
            [sys.executable, "-m", *tool, *wanted], capture_output=True, text=True
        )
        if result.returncode == 0:
            (folder / "done").touch()
            return folder
        said = (result.stderr.strip().splitlines() or [""])[-1]
    raise UserError(
        f"{peer} {VERSIONS[peer]} could not be installed into {folder}: {said}. Leave it out of --against"
    )


def our_folder() -> Path:
    """The folder of our rustbpe; UserError if it is missing or only the published one is installed."""
    code = "import rustbpe; rustbpe.Tokenizer.from_ranks; print(rustbpe.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=base_dir().anchor
    )
    if found.returncode:
        raise UserError(
            "the rustbpe of this repository is not installed, so there is nothing to measure. Install it with "
            "`pip install ./rustbpe`, which needs cargo"
        )
    return Path(found.stdout.strip()).parent


def ask(peer: str, task: Task, folder: Path) -> Answer:
    """Run a task on one side in its own process; a failure is a UserError with the last lines it printed."""
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    threads = {"RAYON_NUM_THREADS": str(task["threads"])}
    environment = {
        **os.environ,
        **single,
        **threads,
        "PYTHONPATH": f"{folder}",
        "PYTHONSAFEPATH": "1",
    }
    command = [sys.executable, str(SIDE), json.dumps({**task, "side": peer})]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        words = result.stderr.strip().splitlines()[-3:]
        raise UserError(
            f"{peer} ended with code {result.returncode}; its last lines:\n  " + "\n  ".join(words)
        )
    return json.loads(result.stdout.splitlines()[-1])


class Sides:
    """The sides of a run: our folder and the folders of the peers, which are installed if needed."""

    def __init__(self, against: Sequence[Peer], threads: int):
        self.against, self.threads = against, threads
        ours = our_folder()
        self.folders = {
            "ours": ours,
            "numpy": ours,
            **{peer: peer_folder(peer) for peer in against},
        }

    def ask(self, peer: str, **task: Any) -> Answer:
        """Run a task on the side of this name."""
        return ask(peer, {"threads": self.threads, **task}, self.folders[peer])
