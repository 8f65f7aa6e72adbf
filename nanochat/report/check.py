"""Says whether this machine computes right: trains a golden run, or reads a run, and compares."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from nanochat.common import UserError, log, tr
from nanochat.data.limits import cores
from nanochat.report.golden import Golden, Verdict, compare, golden_of, load, read_run

CORPUS = "tinyworld"  # every golden run uses it, as it needs no network
MOST_THREADS = 4  # models this small gain nothing from more
LAST_LINES = 15  # how many lines of a failed command's output to show


def check(folder: Path | None, name: str | None) -> Verdict:
    """Return the verdict about the run in a checkpoint folder, or about this machine.

    Without a folder, train the golden run `name` (by default d3) from nothing in a temporary
    folder, which takes a minute or two on two cores, and judge that run. Raises UserError
    if there is no such golden run, if the folder holds no run to judge, or if a command fails.
    """
    goldens = load()
    if name is not None and name not in goldens.runs:
        raise UserError(
            tr(
                "--golden must be one of {names}, got {name}",
                names=", ".join(goldens.runs),
                name=name,
            ),
            2,
        )
    chosen = goldens.default if name is None else goldens.runs[name]
    if folder is not None:
        run = read_run(folder)
        return compare(run, golden_of(run, goldens) if name is None else chosen, goldens)
    with tempfile.TemporaryDirectory(prefix="nanochat-check-") as base:
        return compare(read_run(train(chosen, Path(base))), chosen, goldens)


def train(golden: Golden, base: Path, environment: Mapping[str, str] | None = None) -> Path:
    """Train a golden run from nothing in the base folder `base`, and return its checkpoint folder.

    What `base` already has, such as the corpus, is used. `environment` is added to the variables of
    the commands. Raises UserError with the last lines of a command that fails.
    """
    variables = {
        "OMP_NUM_THREADS": str(min(cores(), MOST_THREADS)),
        **os.environ,
        "NANOCHAT_BASE_DIR": str(base),
        **(environment or {}),
    }
    for title, command in commands(golden):
        log(f"{title}: python -m {' '.join(command)}")
        process = subprocess.run(
            [sys.executable, "-m", *command],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        if process.returncode:
            raise UserError(
                tr(
                    "the command ended with code {code}, so nothing was compared. Its last "
                    "lines:\n{lines}",
                    code=process.returncode,
                    lines="\n".join(process.stdout.splitlines()[-LAST_LINES:]),
                )
            )
    return base / "base_checkpoints" / golden.name


def commands(golden: Golden) -> list[tuple[str, list[str]]]:
    """Return a title and the words after `python -m` of each command that trains a golden run."""
    data = ["--data", CORPUS]
    vocabulary = ["--vocab_size", str(golden.vocabulary)]
    of_run = [
        f"--model_tag={golden.name}",
        f"--stop_at={len(golden.losses)}",
        "--eval_every=0",
        "--samples=0",
        "--no_compile",
        "--other_code",
    ]
    return [
        (tr("corpus"), ["nanochat.dataset", *data]),
        (tr("tokenizer"), ["scripts.tok_train", *data, *vocabulary]),
        (tr("training"), ["scripts.base_train", *data, *golden.flags, *of_run]),
    ]


def report(verdict: Verdict) -> str:
    """Return the verdict in words: what was compared, the result, and likely causes."""
    about = tr(
        "golden run {golden}, {steps} losses, {format} on {device}; tolerance {tolerance:.2g} nats",
        golden=verdict.golden,
        steps=verdict.steps,
        format=verdict.number_format,
        device=verdict.device_kind,
        tolerance=verdict.tolerance,
    )
    if verdict.predicted:
        about += tr(" (predicted: nobody has measured the tolerance on this kind of device)")
    if verdict.first_wrong is None:
        result = tr(
            "all losses agree: the largest difference is {worst:.2g} nats, at step {step}",
            worst=verdict.worst,
            step=verdict.worst_step,
        )
    else:
        result = tr(
            "step {step} is the first that differs: loss {loss:.5f} instead of {expected:.5f}, by "
            "{difference:.2g} nats; the largest difference is {worst:.2g}, at step {worst_step}",
            step=verdict.first_wrong,
            loss=verdict.loss,
            expected=verdict.expected,
            difference=abs(verdict.loss - verdict.expected),
            worst=verdict.worst,
            worst_step=verdict.worst_step,
        )
    lines = [about, result]
    if verdict.is_blunt:
        lines.append(
            tr(
                "so few losses in {format} hide a wrong attention mask or kernel; a sharper check "
                "is python -m nanochat.report check",
                format=verdict.number_format,
            )
        )
    if verdict.causes:
        lines.append(tr("likely causes:"))
        lines += [f"- {cause}" for cause in verdict.causes]
    return "\n".join(lines)


def main(folder: Path | None, name: str | None) -> None:
    """Check a run or this machine, and log the verdict; raise UserError if it computes wrong."""
    verdict = check(folder, name)
    text = report(verdict)
    if verdict.is_other:
        raise UserError(
            tr(
                "this run is not the golden run as this version trains it, so it cannot show that "
                "the machine computes right\n{report}",
                report=text,
            )
        )
    if not verdict.right:
        raise UserError(tr("this does NOT compute right\n{report}", report=text))
    log(text)
    log(tr("this computes right"))
