"""The golden numbers: the losses that known runs must have, and how a run compares with them.

golden.json has, for each golden run, its commands' settings, the losses of its first steps in fp32,
and tolerances for each number format. `python -m dev.golden_numbers` measures and writes the file.
A run on a CPU, GPU or NPU that computes right has these losses within the tolerance, because the
initial parameters and the order of the rows follow from the seed alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, tr
from nanochat.runtime.trackers.jsonl import read_metrics

FILE = Path(__file__).parent / "golden.json"
FEWEST_STEPS = 10  # fewer losses than this say little
# After so many losses, a wrong mask or rotation shows beyond the rounding of every number format.
ENOUGH_STEPS = 50
DEFAULT = "d3"  # the golden run that `check` trains if none is named
# Settings that make a run another experiment; a run that differs in others has a mistake to find.
IDENTITY = ("corpus", "family", "depth", "max_seq_len", "num_iterations", "total_batch_size")
COARSE = ("int8", "fp8")  # values of --matmul that are number formats of their own
MEASURED = "cpu"  # the device whose tolerances were measured; those of others are predicted


@dataclass(frozen=True)
class Golden:
    """A golden run: how to train it, and what it must show."""

    name: str
    vocabulary: int  # entries of the tokenizer, which is trained on the corpus
    flags: tuple[str, ...]  # flags of scripts.base_train
    settings: dict[str, Any] = field(repr=False)  # all that decides what a run learns, by name
    grad_norms: tuple[float, ...]  # gradient norms of steps 1 and 2
    losses: tuple[float, ...] = field(repr=False)  # losses of steps 1, 2, ..., in nats
    tolerances: dict[str, float]  # number format -> largest difference of a loss, in nats
    gradient_tolerances: dict[str, float]  # the same, as a fraction of a norm
    end: dict[str, Any] = field(default_factory=dict)  # figures of the last step over seeds

    def tolerance(self, number_format: str, device_kind: str, factor: float) -> float:
        """Return the largest difference of a loss that counts as rounding, in nats.

        On devices other than CPUs the tolerance is predicted: the measured one times `factor`.
        Raises UserError (exit code 2) if the file has no tolerance for the number format.
        """
        if number_format not in self.tolerances:
            raise UserError(
                tr(
                    "there are no golden numbers for the number format {format}, only for "
                    "{formats}; train with one of these (NANOCHAT_DTYPE, --matmul)",
                    format=number_format,
                    formats=", ".join(self.tolerances),
                ),
                2,
            )
        measured = self.tolerances[number_format]
        return measured if device_kind == MEASURED else measured * factor


@dataclass(frozen=True)
class Goldens:
    """The content of golden.json."""

    runs: dict[str, Golden]
    factor_elsewhere: float  # multiplies tolerances on devices without measurements

    @property
    def default(self) -> Golden:
        """The golden run that `check` trains if none is named."""
        return self.runs[DEFAULT]


@dataclass(frozen=True)
class Trained:
    """What a run says about itself: its settings, number format, device and metrics."""

    settings: dict[str, Any]
    number_format: str  # float32, bfloat16, float16, or a value of COARSE
    device_kind: str
    metrics: list[dict[str, Any]] = field(repr=False)


@dataclass(frozen=True)
class Verdict:
    """Whether a run has the golden losses. If not: where it leaves them, and why perhaps."""

    golden: str
    number_format: str
    device_kind: str
    tolerance: float  # nats per token
    steps: int  # that were compared
    worst_step: int
    worst: float  # the largest difference of a loss, in nats
    first_wrong: int | None  # the first step whose loss differs by more than the tolerance
    loss: float = 0.0  # the loss of that step; `expected` is what it should be
    expected: float = 0.0
    causes: tuple[str, ...] = ()
    is_other: bool = False  # the run's settings differ from the golden run's: these are the causes

    @property
    def right(self) -> bool:
        """Whether the run computes right: all losses agree, and so do the settings."""
        return self.first_wrong is None and not self.causes

    @property
    def is_blunt(self) -> bool:
        """Whether so few losses in so coarse a format may hide a wrong mask or rotation."""
        return self.steps < ENOUGH_STEPS and self.number_format != "float32"

    @property
    def predicted(self) -> bool:
        """Whether the tolerance is predicted for this device, rather than measured on it."""
        return self.device_kind != MEASURED


def load(path: Path = FILE) -> Goldens:
    """Return the golden numbers in a file, by default those of this version."""
    content = read_json(path)
    runs = {}
    for name, values in content["runs"].items():
        for field_name in ("flags", "grad_norms", "losses"):
            values[field_name] = tuple(values[field_name])
        runs[name] = Golden(name, **values)
    return Goldens(runs, content["elsewhere"]["factor"])


def read_run(folder: Path) -> Trained:
    """Return what the run in a checkpoint folder says about itself.

    Raises UserError (exit code 2) if the folder has no metrics.jsonl or no checkpoint.
    """
    metas = sorted(folder.glob("step_*/meta.json"))
    metrics = [line for line in read_metrics(folder) if "loss" in line]
    if not metas or not metrics:
        raise UserError(
            tr(
                "{folder} has no metrics.jsonl with losses beside a checkpoint; name a folder of "
                "base_checkpoints, such as ~/.cache/nanochat/base_checkpoints/smoke",
                folder=folder,
            ),
            2,
        )
    meta = read_json(metas[-1])
    made_with = meta.get("made_with", {})
    if not {"number format", "device"} <= set(made_with):
        raise UserError(
            tr(
                "{folder} does not say in which number format and on what device it was trained; "
                "name a run of a later version",
                folder=metas[-1].parent,
            ),
            2,
        )
    matmul = meta["config"].get("matmul")
    number_format = matmul if matmul in COARSE else made_with["number format"]
    return Trained(meta["config"], number_format, made_with["device"], metrics)


def golden_of(run: Trained, goldens: Goldens) -> Golden:
    """Return the golden run that a run repeats, or was meant to repeat.

    Raises UserError (exit code 2) if its corpus, size, steps or batch are those of none.
    """
    for golden in goldens.runs.values():
        if all(golden.settings[name] == run.settings.get(name) for name in IDENTITY):
            return golden
    raise UserError(
        tr(
            "no golden run has the settings of this one ({settings}); there are golden numbers for "
            "{names}",
            settings=", ".join(f"{name}={run.settings.get(name)}" for name in IDENTITY),
            names=", ".join(goldens.runs),
        ),
        2,
    )


def compare(run: Trained, golden: Golden, goldens: Goldens) -> Verdict:
    """Return the verdict about a run that repeats a golden run.

    Raises UserError (exit code 2) if the run has fewer than ten losses to compare, or if its number
    format has no tolerance.
    """
    tolerance = golden.tolerance(run.number_format, run.device_kind, goldens.factor_elsewhere)
    losses = _first_losses(run.metrics, len(golden.losses))
    differences = [
        abs(loss - expected) for loss, expected in zip(losses, golden.losses, strict=False)
    ]
    worst = max(differences)
    wrong = [step for step, difference in enumerate(differences, 1) if difference > tolerance]
    causes = changed_settings(run.settings, golden.settings)
    about = {
        "golden": golden.name,
        "number_format": run.number_format,
        "device_kind": run.device_kind,
        "tolerance": tolerance,
        "steps": len(differences),
        "worst_step": differences.index(worst) + 1,
        "worst": worst,
        "is_other": bool(causes),
    }
    if not wrong:
        return Verdict(**about, first_wrong=None, causes=tuple(causes))
    first = wrong[0]
    if not causes:
        causes = _likely_causes(run, golden, worst, goldens.factor_elsewhere)
    return Verdict(
        **about,
        first_wrong=first,
        loss=losses[first - 1],
        expected=golden.losses[first - 1],
        causes=tuple(causes),
    )


def _first_losses(metrics: Sequence[Mapping[str, Any]], count: int) -> list[float]:
    """Return the losses of step 1 up to `count` or the last; infinite where one was not finite."""
    by_step = {line["step"]: line["loss"] for line in metrics}
    steps = range(1, min(count, max(by_step)) + 1)
    if len(steps) < FEWEST_STEPS:
        raise UserError(
            tr(
                "the run has {steps} step(s), and at least {fewest} are compared; let it train on",
                steps=len(steps),
                fewest=FEWEST_STEPS,
            ),
            2,
        )
    losses = (by_step.get(step) for step in steps)
    return [math.inf if loss is None else loss for loss in losses]


def changed_settings(settings: Mapping[str, Any], golden: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each setting that differs from the golden run's."""
    return [
        tr(
            "the setting {name}: {value} in this run, {golden} in the golden run",
            name=name,
            value=settings.get(name),
            golden=value,
        )
        for name, value in golden.items()
        if settings.get(name) != value
    ]


def _likely_causes(run: Trained, golden: Golden, worst: float, factor: float) -> list[str]:
    """Return what may make a run leave the golden losses although its settings are the same.

    The layers begin nearly without effect, so that the gradient of step 1 depends on the data and
    the initial parameters, and hardly on attention or learning rates.
    """
    causes = []
    coarser = [
        name
        for name in golden.tolerances
        if name != run.number_format and worst <= golden.tolerance(name, run.device_kind, factor)
    ]
    if coarser:
        causes.append(
            tr(
                "numbers are rounded as in {formats}, though the run says {format}",
                formats=", ".join(coarser),
                format=run.number_format,
            )
        )
    allowed = golden.gradient_tolerances[run.number_format]
    if run.device_kind != MEASURED:
        allowed *= factor
    measured = run.metrics[0].get("grad_norm") or math.inf
    if abs(measured / golden.grad_norms[0] - 1) > allowed:
        causes.append(
            tr(
                "the gradient of step 1 differs, before any update: another seed, other or damaged "
                "data, a stale tokenizer, or other initial parameters"
            )
        )
    else:
        causes.append(
            tr(
                "the gradient of step 1 is right, and so are the data, the tokenizer and the "
                "initial parameters: learning rates, the optimizer, an attention mask, or a kernel"
            )
        )
    return causes
