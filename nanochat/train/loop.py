"""The arithmetic that every training script shares; the loop itself stays visible in the script."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from nanochat import device
from nanochat.common import UserError, log, warn
from nanochat.device import Compute
from nanochat.nn.operations import Asked
from nanochat.runtime import parallel, profiling, signals
from nanochat.runtime.parallel import Sharding, place_of
from nanochat.runtime.tracking import Tracker, progress_on_terminal
from nanochat.train import memory
from nanochat.train.guards import LossScale, Spikes
from nanochat.train.optim import Optimizers

BAD_STEPS = 10  # non-finite updates in a row after which a run stops


def due(step: int, every: int, last: bool) -> bool:
    """Whether something that happens every `every` steps, and at the end, happens now; `every` <= 0 is never."""
    return every > 0 and (last or (step > 0 and step % every == 0))


class MicroBatches(Protocol):
    """What a step trains on: dataloader.Step, or RL's rollouts."""

    @property
    def num_targets(self) -> int: ...

    @property
    def micro_batches(self) -> Sequence[tuple[Tensor, ...]]: ...


@dataclass(frozen=True)
class Outcome:
    """What one step did."""

    loss: float  # mean nats per target over all ranks
    grad_norm: float
    skipped: bool  # nothing was changed
    reason: str = "not finite"  # of a skipped one


NO_UPDATE = Outcome(0.0, 0.0, skipped=False)  # of a step that had nothing to learn from


def update(
    model: nn.Module, optimizers: Optimizers, step: MicroBatches, scale: LossScale, compute: Compute,
    spikes: Spikes | None = None,
) -> Outcome:  # fmt: skip
    """Forward, backward and one optimizer step over a step's micro-batches; skipped whole, on all ranks, if not finite
    or if `spikes` finds one.

    The loss is divided by the targets of the whole step over all ranks, so that neither the split into micro-batches
    nor the number of ranks changes the gradient. UserError with the next value to try where memory runs out.
    """
    rows = [len(batch[0]) for batch in step.micro_batches]
    with memory.advising(max(rows, default=1), sum(rows)):
        return _update(model, optimizers, step, scale, compute, spikes)


def _update(
    model: nn.Module, optimizers: Optimizers, step: MicroBatches, scale: LossScale, compute: Compute,
    spikes: Spikes | None,
) -> Outcome:  # fmt: skip
    optimizers.zero_grad()
    device.clear_overflow(compute)
    # FSDP averages gradients over ranks; every rank's part is of the same whole, so the average is undone here.
    factor = scale.value * compute.world_size / max(step.num_targets, 1)
    batches = step.micro_batches
    loss_sum = torch.zeros((), dtype=torch.float32, device=compute.device)
    for number, batch in enumerate(batches):
        profiling.mark("forward")
        inputs, targets, *weights = (device.to_device(tensor, compute) for tensor in batch)
        parallel.sync_gradients(model, number == len(batches) - 1)
        loss = model(inputs, targets, "sum", *weights)
        profiling.mark("backward")
        (loss * factor).backward()
        loss_sum += loss.detach()
    profiling.mark("gradient norm")
    gradients = [device.local(p.grad) for p in model.parameters() if p.grad is not None]
    figures = torch.cat((compute.operations.square_sums(gradients), loss_sum[None], *device.overflows(compute)))
    host, count = figures.cpu().double(), len(gradients)  # the one host sync
    norm_square, loss_total, overflows = parallel.total(
        [float(host[:count].sum()), float(host[count]), float(host[count + 1 :].sum())], compute
    )
    norm_square /= place_of(next(model.parameters())).replicas  # which hold the same gradients
    mean, norm = loss_total / max(step.num_targets, 1), math.sqrt(max(norm_square, 0.0)) / scale.value
    profiling.mark("optimizer")
    finite = math.isfinite(mean) and math.isfinite(norm_square) and not overflows
    spike = finite and spikes is not None and spikes.found(norm)
    if finite and not spike:
        if scale.value != 1.0:
            torch._foreach_mul_(gradients, 1 / scale.value)  # pyright: ignore[reportPrivateImportUsage]
        optimizers.step()
    scale.update(finite)
    optimizers.zero_grad()
    return Outcome(mean, norm, spike or not finite, "more than six sigma above the last 128" if spike else "not finite")


@dataclass
class Meter:
    """Running figures of a stage; its fields are saved in checkpoints."""

    steps: int  # of the whole run
    tokens_per_step: int
    flops_per_token: int
    peak: float  # FLOP/s over all ranks
    smooth_loss: float = 0.0  # exponential average, not yet debiased
    smooth_weight: float = 0.0
    seconds: float = 0.0  # spent in steps, over all runs of this stage
    cpu_seconds: float = 0.0  # of this rank's process, over all runs of this stage
    bad_in_a_row: int = 0
    skipped: int = 0
    _recent: list[float] = field(default_factory=list)

    @staticmethod
    def start(
        steps: int, tokens_per_step: int, flops_per_token: int, compute: Compute, state: Mapping[str, Any]
    ) -> "Meter":
        """Begin, or go on from what state() kept."""
        peak, source = device.peak_flops(compute)
        log(f"mfu is measured against {peak / 1e12:.3g} TFLOP/s a rank ({source})")
        return Meter(steps, tokens_per_step, flops_per_token, peak * compute.world_size, **state.get("meter", {}))

    def tick(self, step: int, outcome: Outcome, seconds: float, cpu_seconds: float, lrm: float) -> dict[str, Any]:
        """Take in a step (from 1) and return its line for metrics.jsonl; ten bad steps in a row stop the run."""
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self._recent = [*self._recent[-19:], seconds]
        if outcome.skipped:
            self.skipped += 1
            self.bad_in_a_row += 1
            warn(
                f"step {step}: loss {outcome.loss}, gradient norm {outcome.grad_norm}: {outcome.reason}, update skipped"
            )
            if self.bad_in_a_row >= BAD_STEPS:
                raise UserError(
                    f"{BAD_STEPS} updates in a row were skipped, the last at step {step} ({outcome.reason}); the last "
                    "checkpoint is from before them or among them, with the parameters of before. Lower the learning "
                    "rates, or look at the data near this step, and start again."
                )
        else:
            self.bad_in_a_row = 0
            self.smooth_loss = 0.9 * self.smooth_loss + 0.1 * outcome.loss
            self.smooth_weight = 0.9 * self.smooth_weight + 0.1
        speed = self.tokens_per_step / seconds
        return {
            "step": step,
            "loss": outcome.loss,
            "smooth_loss": self.smooth,
            "grad_norm": outcome.grad_norm,
            "lrm": lrm,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "tokens_per_second": speed,
            "mfu": 100 * speed * self.flops_per_token / self.peak,
            "total_seconds": self.seconds,
            "skipped": outcome.skipped,
        }

    @property
    def smooth(self) -> float:
        """The debiased average loss."""
        return self.smooth_loss / self.smooth_weight if self.smooth_weight else float("nan")

    def eta(self, step: int) -> float:
        """Seconds left, from the pace of the last twenty steps."""
        return (self.steps - step) * sum(self._recent) / max(len(self._recent), 1)


METER_STATE = ("smooth_loss", "smooth_weight", "seconds", "cpu_seconds", "bad_in_a_row", "skipped")


def state(meter: Meter, scale: LossScale, line: Mapping[str, Any], spikes: Spikes | None = None) -> dict[str, Any]:
    """What a resume needs of the loop's own figures; `line` is the step's."""
    return {"meter": {name: getattr(meter, name) for name in METER_STATE}, "line": dict(line),
            "scale": {"value": scale.value, "good_steps": scale.good_steps},
            "norms": [] if spikes is None else spikes.norms}  # fmt: skip


def step_line(line: dict[str, Any], steps: int, eta: float) -> str:
    """A step in the published format, with what is left to go."""
    step = line["step"]
    return (
        f"step {step:05d}/{steps:05d} ({100 * step / steps:.2f}%) | loss: {line['smooth_loss']:.3f} | "
        f"lrm: {line['lrm']:.2f} | dt: {1000 * line['seconds']:.1f}ms | tok/sec: {line['tokens_per_second']:,.0f} | "
        f"mfu: {line['mfu']:.2f} | total time: {line['total_seconds'] / 60:.1f}m | eta: {eta / 60:.1f}m"
    )


class Progress:
    """A bar on a terminal, one line a step in a log; on rank 0 only."""

    def __init__(self, title: str, steps: int, done: int, main: bool):
        self.steps, self.main, self.bar = steps, main, None
        if main and progress_on_terminal():
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
            self.bar = Progress(*columns, refresh_per_second=4, transient=True)
            self.task = self.bar.add_task(title, total=steps, completed=done, note="")
            self.bar.start()

    def show(self, line: dict[str, Any], eta: float) -> None:
        """Show a step."""
        if self.bar is not None:
            note = (
                f"{line['step']}/{self.steps} loss {line['smooth_loss']:.3f} "
                f"{line['tokens_per_second']:,.0f} tok/s, {eta / 60:.1f} min left"
            )
            self.bar.update(self.task, completed=line["step"], note=note)
        elif self.main:
            log(step_line(line, self.steps, eta))

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.stop()


class SaveClock:
    """When to save by time: every minute, but saving must stay under about three percent of a run."""

    def __init__(self, seconds: float = 60.0):
        self.seconds, self.cost, self.last = seconds, 0.0, time.monotonic()

    def due(self, compute: Compute) -> bool:
        """Whether a save is due; rank 0's clock decides for all."""
        wait = max(self.seconds, 30 * self.cost)
        return bool(parallel.agree(int(self.seconds > 0 and time.monotonic() - self.last >= wait), compute))

    def saved(self, cost: float) -> None:
        """A save took `cost` seconds and has just ended."""
        self.cost, self.last = cost, time.monotonic()


@dataclass(frozen=True)
class StageFlags:
    """Flags that all training scripts share."""

    run: str = "dummy"
    """name of a wandb run; dummy = no wandb"""
    device_type: str = ""
    """npu, cuda or cpu; empty = the first that is usable"""
    data: str | None = None
    """corpus by name, or the folder it was made from; default: the only one prepared, after base the model's"""
    model_tag: str | None = None
    """folder of the checkpoints, such as d4; default: d and the depth, after base the newest"""
    save_every: int = 0
    """steps between saves; 0 = by time and at the end only"""
    save_seconds: float = 60.0
    """seconds between saves, longer where saving takes longer; 0 = never by time"""
    keep: int = 3
    """newest steps kept; 0 = all"""
    resume: int | Literal["auto", "none"] = "auto"
    """go on from: auto = the newest whole step, none = begin anew, or a step; what is newer is set aside"""
    other_code: bool = False
    """go on although the code was changed since the last save"""
    hang_seconds: float = 600.0
    """end all ranks when one of them has not moved for so long; 0 = wait for ever"""
    stop_at: int | None = None
    """save and stop after this step; the same command without it goes on"""
    compile: bool | None = None
    """torch.compile; default: where it works and pays"""
    kernels: Asked = "auto"
    """on an NPU: fused = its own operators or an error, plain = torch's, auto = what the chip has"""
    shard: Sharding = "grad"
    """what many devices share out: none = each holds all, grad = gradients and state (ZeRO-2), full = parameters too
    (ZeRO-3)"""
    seed: int = 42
    """seed of parameters, order of rows and sampling"""
    profile: bool = False
    """time and trace ten steps: tables of where their time goes, and a trace, in the folder profile beside the
    checkpoints; then the run goes on"""


def begin(flags: StageFlags, compute: Compute) -> None:
    """Refuse a device that cannot train, before anything is computed."""
    if why := compute.platform.cannot_train():
        raise UserError(why)


class Stage:
    """What a training script carries from step to step: figures, log, progress bar and the clock of saves."""

    def __init__(
        self, name: str, folder: Path, flags: StageFlags, meter: Meter, step: int, compute: Compute,
        state: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        """After `step` updates; `state` is what resume() found. `owed` is the line of a step that was saved, but not
        logged, since the run was stopped in the measurements between the two."""
        self.meter, self.compute, self.flags = meter, compute, flags
        self.stop = min(flags.stop_at or meter.steps, meter.steps)
        self.tracker = Tracker(folder, flags.run, asdict(flags), step, compute.main)
        unlogged = parallel.agree(int(self.tracker.last < step), compute)
        self.owed: dict[str, Any] | None = (state or {}).get("line") if unlogged else None
        self.progress = Progress(name, meter.steps, step, compute.main)
        self.clock = SaveClock(flags.save_seconds)
        profiling.begin(flags.profile, name, folder, self.stop - step, compute)
        self._mark = (time.perf_counter(), time.process_time())
        self._cut = False  # a signal cut a measurement short

    def start(self) -> None:
        """A step begins now."""
        profiling.begin_step()
        self._mark = (time.perf_counter(), time.process_time())

    def tick(self, step: int, outcome: Outcome, lrm: float) -> dict[str, Any]:
        """A step (counted from 1) ended now; returns its figures, and shows them."""
        seconds, cpu = time.perf_counter() - self._mark[0], time.process_time() - self._mark[1]
        signals.alive(step)
        profiling.end_step()
        line = self.meter.tick(step, outcome, seconds, cpu, lrm)
        self.progress.show(line, self.meter.eta(step))
        return line

    def save_due(self, step: int) -> bool:
        """Whether step `step` is to be saved: the last, every `save_every`, or by the clock."""
        last = step == self.stop
        return last or due(step, self.flags.save_every, last) or self.clock.due(self.compute)

    def ready(self, step: int, finish: Callable[[dict[str, Any]], None], first: dict[str, Any] | None = None) -> None:
        """After `step` updates: measure what is owed, or before any the line `first`. The stage ends here if a signal
        came while data and kernels were made ready."""
        try:
            signals.check(self.compute)
            line = self.owed or (first if step == 0 else None)
            if line:
                finish(line)
        except signals.Stopped:
            self.stop, self._cut = step, True

    def conclude(
        self, line: dict[str, Any], save: Callable[[dict[str, Any]], float], finish: Callable[[dict[str, Any]], None]
    ) -> None:
        """The end of a step: save where that is due, before measuring, which may fail; then measure and log.

        Where a signal asks for the end, also in the middle of measuring, the step is saved and the stage ends: what
        was not measured is owed.
        """
        asked = signals.agreed(self.compute)
        saved = self.save_due(line["step"]) or asked
        if saved:
            self.clock.saved(save(line))
        try:
            finish(line)
        except signals.Stopped:
            asked = self._cut = True
            if not saved:
                save(line)
        if asked:
            self.stop = line["step"]
            log(f"{signals.asked()}: saved step {self.stop:,} and stopping")

    def complete(self, step: int) -> bool:
        """Whether after `step` updates all are done and measured."""
        return step == self.meter.steps and not self._cut

    def close(self) -> None:
        """End the bar and the files."""
        self.progress.close()
        self.tracker.close()


def log_end(folder: Path, step: int, steps: int) -> None:
    """Say where the checkpoints are, and how to go on from a stop."""
    how = "the same command goes on" if signals.asked() else "leave --stop_at out to go on"
    log(f"checkpoints: {folder}" + ("" if step == steps else f" (stopped at step {step}; {how})"))
