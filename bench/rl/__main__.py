"""Measures a step of RL in CPU seconds: sampling, training and the rest, as trees and as rows.

python -m bench.rl --quick           # ours alone; ends within 50 seconds
python -m bench.rl --upstream DIR    # DIR: a checkout of karpathy/nanochat

One thread, the model of the tinyworld preset, untrained. `sums` has the sizes of the preset's step: 32 problems with 16
short replies. `gsm8k` has long prompts and replies, of which no two are alike. The sides take turns, so that a busy
machine slows them equally. The last line is one JSON object.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench.rl.ours import Ours
from bench.rl.work import GSM8K, SUMS, Shape
from bench.upstream import check_checkout
from nanochat.common import UserError, log, run

HERE = Path(__file__).resolve().parent
PARTS = {
    "sampling": "sampling",
    "training": "training",
    "forward": "training",
    "backward": "training",
}  # others: rest

Step = Callable[[int], dict[str, float]]


@dataclass(frozen=True)
class Config:
    """Print CPU seconds of a step, and one JSON object on the last line."""

    quick: bool = False
    """two steps of each kind, so that it ends within 50 seconds"""
    steps: int = 6
    """measured steps of each kind, after one that warms up"""
    upstream: Path | None = None
    """folder with a checkout of karpathy/nanochat to measure beside ours"""


class Peer:
    """The process of the checkout; it runs until close()."""

    def __init__(self, checkout: Path, shape: Shape, dtype: str):
        # Upstream decorates its optimizer with torch.compile; only the last variable keeps it uncompiled.
        own = {
            "PYTHONPATH": str(checkout),
            "NANOCHAT_DTYPE": dtype,
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "upstream.py"), shape.name],
            env={**os.environ, **own},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._line()

    def step(self, number: int) -> dict[str, float]:
        """CPU seconds of a step's parts."""
        assert self._process.stdin is not None
        print(number, file=self._process.stdin, flush=True)
        found = self._line()
        return dict(json.loads(found[found.index("{") :]))

    def _line(self) -> str:
        """The next line that is an answer; upstream's modules print lines of their own."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("ready", "{")):
                return line
        raise UserError(
            f"the checkout's process ended with code {self._process.wait()}; the lines above say why"
        )

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def measure(sides: dict[str, Step], steps: int) -> dict[str, dict[str, float]]:
    """The median of each side's sampling, training and rest, in CPU seconds; the sides take turns."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for number in range(steps + 1):
        for name, step in sides.items():
            sums = {"sampling": 0.0, "training": 0.0, "rest": 0.0}
            for part, seconds in step(number).items():
                sums[PARTS.get(part, "rest")] += seconds
            found[name].append(sums)
    return {
        name: {
            part: median(one[part] for one in each[1:]) for part in ("sampling", "training", "rest")
        }
        for name, each in found.items()
    }


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    if cfg.upstream is not None:
        check_checkout("--upstream", cfg.upstream)
    result: dict[str, object] = {"bench": "rl"}
    log(
        f"{'shape':<8}{'side':<24}{'sampling':>10}{'training':>10}{'rest':>8}{'CPU s a step':>14}{'tokens/CPU s':>14}"
    )
    for shape in (SUMS, GSM8K):
        steps = (2 if shape is SUMS else 1) if cfg.quick else cfg.steps
        sides: dict[str, Step] = {"trees": Ours(shape, True).step, "rows": Ours(shape, False).step}
        peers: list[Peer] = []
        try:
            if cfg.upstream is not None and shape is GSM8K:
                for dtype in ("float32", "bfloat16"):
                    peers.append(Peer(cfg.upstream, shape, dtype))
                    sides[f"upstream {dtype}"] = peers[-1].step
            measured = measure(sides, steps)
        finally:
            for peer in peers:
                peer.close()
        for name, parts in measured.items():
            whole = sum(parts.values())
            log(
                f"{shape.name:<8}{name:<24}{parts['sampling']:>10.3f}{parts['training']:>10.3f}{parts['rest']:>8.3f}"
                f"{whole:>14.3f}{shape.tokens / whole:>14,.0f}"
            )
            result[f"{shape.name} {name}"] = {
                part: round(seconds, 4) for part, seconds in parts.items()
            }
        if peers:
            best = min(
                sum(parts.values())
                for name, parts in measured.items()
                if name.startswith("upstream")
            )
            default = sum(measured["upstream float32"].values())
            result["vs_upstream_default"] = round(default / sum(measured["trees"].values()), 2)
            result["vs_upstream_best"] = round(best / sum(measured["trees"].values()), 2)
    print(json.dumps(result))


if __name__ == "__main__":
    run(main, Config, __doc__)
