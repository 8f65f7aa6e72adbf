"""Measures the golden numbers, and writes nanochat/report/golden.json.

    python -m dev.golden_numbers ~/golden                      # every golden run; hours of CPU
    python -m dev.golden_numbers ~/golden --only smoke         # some of them; the others stay
    python -m dev.golden_numbers ~/golden --only d3 --fp32_only   # on a CPU that emulates bf16

The losses are those of one run in fp32. A tolerance is MARGIN times the largest difference from
them that a harmless change of the arithmetic made: the number of threads, the rows per pass, the
instructions that the CPU may use, torch's operators in place of ours. Runs that are in the folder
already are not trained again; use an empty folder after a change of the code.
"""

import argparse
import dataclasses
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.checkpoint_manager.same_run import free_flags
from nanochat.common import log, read_json, write_json
from nanochat.report import check, golden
from nanochat.report.golden import Golden, Trained, read_run
from scripts import base_train

MARGIN = 5
ELSEWHERE = {"factor": 2, "predicted": True}  # of the tolerances, on NPUs and GPUs
SEEDS = (42, 43, 44)  # of the end's mean and deviation, for the smallest golden run
TINY = ("--depth=2", "--model_dim=64", "--head_dim=32", "--max_seq_len=256")
SMALL = ("--depth=4", "--model_dim=192", "--head_dim=64", "--max_seq_len=256")
FACTS = (
    "--offset_layers=1",
    "--exclusive_layers=0",
    "--warmdown_ratio=0",
    "--weight_decay=0.84",
)


def preset(shape: tuple[str, ...], tokens: int, steps: int, *more: str) -> tuple[str, ...]:
    """Return the flags with which a preset of speedrun.sh pretrains on one device."""
    step = (f"--total_batch_size={tokens}", f"--num_iterations={steps}")
    return (*shape, "--window_pattern=L", *step, *more)


def rung(depth: int) -> tuple[str, ...]:
    """Return the flags of a rung of bench.multiplier: its shape, batch and 800 steps."""
    shape = (f"--depth={depth}", f"--model_dim={64 * depth}", "--head_dim=64", "--max_seq_len=512")
    return preset(shape, 4096, 800)


@dataclass(frozen=True)
class Case:
    """A golden run to measure."""

    vocabulary: int
    flags: tuple[str, ...]
    steps: int = 50  # whose losses are recorded


@dataclass(frozen=True)
class Change:
    """A harmless change of the arithmetic, under which a tolerance is measured."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


CASES = {
    "smoke": Case(1024, preset(TINY, 2048, 20), steps=20),
    "speedrun": Case(4096, preset(SMALL, 3072, 250, *FACTS)),
    "speedrun-small": Case(4096, preset(SMALL, 4096, 200, *FACTS)),
    "d3": Case(4096, rung(3)),
    "d4": Case(4096, rung(4)),
}
BF16 = {"NANOCHAT_DTYPE": "bfloat16"}
FP16 = {"NANOCHAT_DTYPE": "float16"}
OLD_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}
ONE_ROW = ("--device_batch_size=1",)
REFERENCE = Change("fp32")
INT8 = Change("int8", BF16, ("--matmul=int8",))
FEW_CHANGES = (
    Change("fp32-rows", flags=("--device_batch_size=2",)),
    Change("bf16", BF16),
    INT8,
)
CHANGES = (
    Change("fp32-rows", flags=ONE_ROW),
    Change("fp32-threads", {"OMP_NUM_THREADS": "2"}),
    Change("fp32-old-cpu", OLD_CPU),
    Change("fp32-plain", flags=("--kernels=plain",)),
    Change("bf16", BF16),
    Change("bf16-rows", BF16, ONE_ROW),
    INT8,
    Change("fp16", FP16),
)


def learned(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run that decide what it learns, without the number format."""
    ignored = {*free_flags(base_train.Config), "matmul"}
    return {name: value for name, value in settings.items() if name not in ignored}


def train(name: str, case: Case, change: Change, folder: Path) -> Trained:
    """Return the run of a case with a change of the arithmetic; train it if the folder lacks it."""
    tag = f"{name}-{change.name}"
    base = folder / f"vocabulary-{case.vocabulary}"
    run = Golden(tag, case.vocabulary, (*case.flags, *change.flags), {}, (), (0.0,) * case.steps,
                 {}, {})  # fmt: skip
    checkpoints = base / "base_checkpoints" / tag
    if not list(checkpoints.glob("step_*/meta.json")):
        log(f"== {tag}")
        variables = {"NANOCHAT_DEVICE": "cpu", "NANOCHAT_DTYPE": "float32", **change.environment}
        check.train(run, base, {"OMP_NUM_THREADS": "1", **variables})
    return read_run(checkpoints)


def losses(run: Trained) -> list[float]:
    """Return the losses of a run's steps."""
    return [line["loss"] for line in run.metrics]


def grad_norms(run: Trained) -> list[float]:
    """Return the gradient norms of steps 1 and 2."""
    return [line["grad_norm"] for line in run.metrics[:2]]


def tolerances(reference: Trained, runs: list[Trained]) -> tuple[dict[str, float], ...]:
    """Return the tolerance of losses and of the first gradients' norms for each number format."""
    of_losses: dict[str, float] = {}
    of_gradients: dict[str, float] = {}
    for run in runs:
        pairs = zip(losses(run), losses(reference), strict=True)
        spread = max(abs(loss - expected) for loss, expected in pairs)
        norms = zip(grad_norms(run), grad_norms(reference), strict=True)
        off = max(abs(norm / expected - 1) for norm, expected in norms)
        log(f"{run.number_format}: {spread:.2e} nats; gradients {off:.2e}")
        key = run.number_format
        of_losses[key] = max(of_losses.get(key, 0.0), float(f"{MARGIN * spread:.2g}"))
        of_gradients[key] = max(of_gradients.get(key, 1e-5), float(f"{MARGIN * off:.2g}"))
    return of_losses, of_gradients


def end(name: str, case: Case, folder: Path) -> dict[str, Any]:
    """Return mean and deviation of the running mean of the loss at the last step, over seeds."""
    smooth = []
    for seed in SEEDS:
        change = REFERENCE if seed == SEEDS[0] else Change(f"seed{seed}", flags=(f"--seed={seed}",))
        smooth.append(train(name, case, change, folder).metrics[-1]["smooth_loss"])
    return {
        "step": case.steps,
        "figure": "smooth_loss",
        "mean": round(statistics.fmean(smooth), 4),
        "deviation": round(statistics.stdev(smooth), 4),
        "seeds": list(SEEDS),
    }


def measure(name: str, folder: Path, fp32_only: bool, before: dict[str, Any]) -> dict[str, Any]:
    """Train all runs of a case, and return its entry of golden.json; `before` is what it was.

    A tolerance never falls below the one before, which other hosts may need. With `fp32_only` those
    of other number formats stay as they were.
    """
    case = CASES[name]
    smallest = name == next(iter(CASES))
    reference = train(name, case, REFERENCE, folder)
    changes = CHANGES if smallest else FEW_CHANGES
    if fp32_only:
        changes = tuple(change for change in changes if change.name.startswith("fp32"))
    runs = [train(name, case, change, folder) for change in changes]
    of_losses, of_gradients = tolerances(reference, runs)
    if before:  # other hosts may have rounded further apart
        of_losses = _larger(before["tolerances"], of_losses)
        of_gradients = _larger(before["gradient_tolerances"], of_gradients)
    result = Golden(
        name,
        case.vocabulary,
        case.flags,
        learned(reference.settings),
        tuple(grad_norms(reference)),
        tuple(round(loss, 6) for loss in losses(reference)),
        of_losses,
        of_gradients,
        end(name, case, folder) if smallest else {},
    )
    entry = dataclasses.asdict(result)
    del entry["name"]
    return entry


def _larger(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Return the larger of two tolerances for each number format that has one."""
    return {name: max(before.get(name, 0.0), now.get(name, 0.0)) for name in {**before, **now}}


def main() -> None:
    """Measure the golden runs that the command line names, and write them into golden.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--fp32_only", action="store_true", help="keep the tolerances of other number formats"
    )
    arguments = parser.parse_args()
    runs = read_json(golden.FILE)["runs"] if golden.FILE.exists() else {}
    for name in arguments.only:
        folder = arguments.folder.expanduser()
        runs[name] = measure(name, folder, arguments.fp32_only, runs.get(name, {}))
    ordered = {name: runs[name] for name in CASES if name in runs}
    write_json(golden.FILE, {"elsewhere": ELSEWHERE, "runs": ordered})
    log(f"wrote {golden.FILE}")


if __name__ == "__main__":
    main()
