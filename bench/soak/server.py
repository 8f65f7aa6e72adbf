"""Starts the chat server as a user does, with an untrained model if none is named, and watches the process."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat.checkpoint_manager.locate import checkpoint_dir, make_meta
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.common import UserError
from nanochat.device import compute_init
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import BYTES, PATTERNS, ROLES, Tokenizer
from nanochat.train.optim import Optimizers, Rates

ROOT = Path(__file__).resolve().parent.parent.parent
SOFT_FILES = 1024  # the soft limit of most systems, which the server raises
SHAPE = GPTConfig(
    sequence_len=1024, vocab_size=BYTES + len(ROLES), n_layer=2, n_head=2, n_kv_head=2, n_embd=128
)
START_SECONDS = 120


@dataclass(frozen=True)
class Served:
    """A running server: its port, its process, and the file of everything that it writes."""

    port: int
    pid: int
    log: Path

    def memory(self) -> int:
        """The resident memory of the process in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")
        )


def save_untrained(folder: Path) -> None:
    """Save a small model that was never trained, with a vocabulary of single bytes, into a base folder."""
    before = os.environ.get("NANOCHAT_BASE_DIR")
    os.environ["NANOCHAT_BASE_DIR"] = str(folder)
    try:
        model = GPT(SHAPE)
        model.init_weights()
        tokenizer = Tokenizer([bytes([i]) for i in range(BYTES)], "nanochat", PATTERNS["nanochat"])
        optimizers = Optimizers(
            model, model.parameter_roles(), SHAPE.n_embd, Rates(), 1.0, torch.float32
        )
        meta = make_meta("sft", SHAPE, {"corpus": "untrained"}, 1, {})
        save_checkpoint(
            checkpoint_dir("sft", "soak"),
            1,
            model,
            optimizers,
            tokenizer,
            meta,
            compute_init("cpu"),
        )
    finally:
        os.environ.pop("NANOCHAT_BASE_DIR")
        if before is not None:
            os.environ["NANOCHAT_BASE_DIR"] = before


@contextlib.contextmanager
def serving(flags: tuple[str, ...], untrained: bool) -> Iterator[Served]:
    """Run chat_web on a free port. UserError with its last lines if it does not start."""
    with tempfile.TemporaryDirectory() as name:
        folder, log = Path(name), Path(name) / "log"
        environment = dict(os.environ)
        if untrained:
            save_untrained(folder)
            environment["NANOCHAT_BASE_DIR"] = name
        command = [
            "bash",
            "-c",
            f'ulimit -S -n {SOFT_FILES}; exec "$@"',
            "bash",
            sys.executable,
            "-m",
            "scripts.chat_web",
            "--port=0",
            *flags,
        ]
        with open(log, "wb") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        try:
            yield Served(_port(process, log), process.pid, log)
        finally:
            process.terminate()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        said = log.read_text()
        if "Ctrl-C" in said and (found := re.search(r"http://127\.0\.0\.1:(\d+)", said)):
            return int(found[1])
        time.sleep(0.1)
    tail = "\n".join(log.read_text().splitlines()[-5:])
    raise UserError(
        f"the chat server did not start. It wrote:\n{tail}\nStart it alone: python -m scripts.chat_web"
    )
