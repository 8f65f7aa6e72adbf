"""The sides of bench.tokenizer: where each is installed, and how one is asked to train or to encode."""

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
GPT4 = NANOCHAT.replace("{1,2}", "{1,3}")  # what gigatoken calls gpt4
Task = dict[str, Any]
Answer = dict[str, Any]


def peer_folder(peer: str) -> Path:
    """The folder of a peer, installed there if it is not."""
    folder = base_dir() / "peers" / f"{peer}-{VERSIONS[peer]}"
    if (folder / "done").exists():
        return folder
    wanted = ["--quiet", "--target", str(folder), f"{peer}=={VERSIONS[peer]}"]
    said = ""
    for tool in (["uv", "pip", "install", "--python", sys.executable], ["pip", "install"]):
        result = subprocess.run([sys.executable, "-m", *tool, *wanted], capture_output=True, text=True)
        if result.returncode == 0:
            (folder / "done").touch()
            return folder
        said = (result.stderr.strip().splitlines() or [""])[-1]
    raise UserError(f"{peer} {VERSIONS[peer]} could not be installed to {folder}: {said}. Leave it out of --against")


def our_folder() -> Path:
    """Where our rustbpe lies; UserError if it is the published one."""
    code = "import rustbpe; rustbpe.Tokenizer.from_ranks; print(rustbpe.__file__)"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=base_dir().anchor)
    if found.returncode:
        raise UserError(
            "the rustbpe of this repository is not installed, so there is nothing to measure. Build it: "
            "pip install ./rustbpe (needs cargo)"
        )
    return Path(found.stdout.strip()).parent


def ask(peer: str, task: Task, folder: Path) -> Answer:
    """The answer of a side, from a process of its own."""
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true"}
    threads = {"RAYON_NUM_THREADS": str(task["threads"])}
    environment = {**os.environ, **single, **threads, "PYTHONPATH": f"{folder}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, str(SIDE), json.dumps({**task, "side": peer})]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        words = result.stderr.strip().splitlines()[-3:]
        raise UserError(f"{peer} ended with code {result.returncode}:\n  " + "\n  ".join(words))
    return json.loads(result.stdout.splitlines()[-1])


class Sides:
    """Every side's folder; tasks go to it by name."""

    def __init__(self, against: Sequence[Peer], threads: int):
        self.against, self.threads = against, threads
        self.folders = {"ours": our_folder(), **{peer: peer_folder(peer) for peer in against}}

    def ask(self, peer: str, **task: Any) -> Answer:
        return ask(peer, {"threads": self.threads, **task}, self.folders[peer])
