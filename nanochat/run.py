"""One run of a training stage: its folder, its resumption, and the order of its bookkeeping.

After an update, a run counts the step, logs it, saves it if a save is due, then measures, and then
writes the step's line to metrics.jsonl. The training loop is in the script:

    with Run(folder, plan, model, tokenizer, optimizers, cfg, compute) as run:
        fast = run.prepare(rows, batch)
        batches = run.batches(rows, batch)
        for step in run.steps():  # 0 .. the number of steps
            with run.between_steps(cfg.eval_every) as due:
                if due:
                    run.record(val_bpb=validation.bits_per_byte(batch.device_batch_size))
            if run.ended:
                break
            optimizers.schedule(lrm, momentum, decay)
            data = next(batches)
            with run.update(data.num_targets) as update:
                ...  # see nanochat/step.py
            run.finish(outcome, lrm)
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import torch.nn as nn
from torch import Tensor

from nanochat import dataloader, device
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import Parent, checkpoint_dir, find_parent, make_meta
from nanochat.checkpoint_manager.parts.background import Saver
from nanochat.checkpoint_manager.resume import (
    Resumed,
    begun_sizes,
    finished,
    hold,
    resume_stage,
)
from nanochat.checkpoint_manager.same_run import OLD_FLAGS, RunSettings
from nanochat.checkpoint_manager.save import refuse_parts_of_adapter
from nanochat.common import UserError, appendix, log, required_appendix, tr
from nanochat.data.command_line import run
from nanochat.dataloader import Source
from nanochat.device import Compute
from nanochat.meter import Meter, SaveClock, due, listed, step_line, step_note
from nanochat.model import Model
from nanochat.optim import Optimizers
from nanochat.platforms.operations import Matmul
from nanochat.runtime import fingerprint, graphs, next_commands, parallel, signals
from nanochat.runtime.progress import Progress, duration
from nanochat.runtime.samples import forget_samples
from nanochat.runtime.trackers.jsonl import describe_run
from nanochat.runtime.tracking import Tracker, parse_trackers
from nanochat.runtime.watch import guarded
from nanochat.step import Outcome, Safeguards, Update
from nanochat.tokenizer import Tokenizer
from nanochat.train import sizes
from nanochat.train.compile import Ahead, compiled, is_compiled, missing
from nanochat.train.flags import RunFlags, StageFlags
from nanochat.train.setup import set_matmul
from nanochat.train.sizes import Batch

ANNOUNCED_SECONDS = 60  # shorter runs cannot be predicted well from the device's peak

PassLoss = Callable[..., Tensor]  # (model, *tensors of a pass) -> the sum of its losses ()


class AlreadyDone(Exception):
    """Raised if an earlier start has finished this run; launch() then ends without an error."""


# --- the folder of a run -------------------------------------------------------------------------


@dataclass(frozen=True)
class RunFolder:
    """The checkpoint folder of a run, and the settings with which the run resumes."""

    stage: str  # base, mid, sft, rl or tune
    tag: str
    path: Path
    settings: RunSettings  # the flags, and facts that are not flags, such as the parent
    begun_rows: int | None  # rows per step of the run that is resumed; None for a new run
    begun_shape: dict[str, int] | None  # its model's shape; None for a new run


def open_folder(
    stage: str, tag: str, cfg: Any, flags: RunFlags, compute: Compute, **facts: str
) -> RunFolder:
    """Return the folder of the run that the flags describe, after checking that it can be used.

    Every rank must call this. `cfg` holds all flags of the script. The flags that are not Free and
    `facts` (corpus, parent, tokenizer) are the settings that a resumed run must share. Raises
    AlreadyDone if an earlier start finished the run. Raises UserError if the device cannot train,
    if a flag cannot be used, if the ranks were started with different settings, or if, with
    --resume=auto, the newest checkpoint has different settings.
    """
    reason = compute.platform.cannot_train()
    if reason:
        raise UserError(reason)
    parse_trackers(flags.track, flags.run)  # rejects an invalid list before anything is read
    path = checkpoint_dir(stage, tag)
    settings = RunSettings.of(cfg, **facts)
    fingerprint.check_start(settings.values, compute)
    if flags.graphs:  # reject impossible flags before an earlier run is moved aside
        graphs.check(compute, flags.compile)
    elif flags.compile:
        missing(True, compute)
    report = appendix("nanochat.report.sections")
    is_reported = report is None or report.has_training_section(stage, tag)
    if finished(path, settings, compute, is_reported, flags.resume):
        raise AlreadyDone
    return RunFolder(stage, tag, path, settings, *begun_sizes(path, flags.resume, compute))


def parent_of(
    source: str, step: int | None, stage: str, flags: StageFlags, own_file: str | None
) -> tuple[Parent, str]:
    """Return and log the checkpoint that a stage starts from, and the tag of its own checkpoints.

    The checkpoint is the one of `step`, or the newest if `step` is None. `own_file` is the user's
    own data file, if the stage learns from one. Raises UserError as find_parent() does.
    """
    parent = find_parent(source, flags.model_tag, step)
    tag = flags.own_tag(parent.tag, own_file)
    log(
        tr(
            "{stage}: training the model {tag} of stage {stage_2}, step {step:,}; "
            "checkpoints go to {stage_3}",
            stage=stage,
            tag=parent.tag,
            stage_2=parent.stage,
            step=parent.step,
            stage_3=checkpoint_dir(stage, tag),
        )
    )
    return parent, tag


def load_parent(parent: Parent, compute: Compute, matmul: Matmul) -> tuple[Model, Tokenizer]:
    """Return the parent's model with its weights in fp32, and its tokenizer.

    In training, the model multiplies its large matrices in the format `matmul`, the value of
    --matmul. Raises UserError (exit code 2) if that is impossible.
    """
    loaded = load_model(parent.stage, parent.tag, parent.step, compute, dtype=device.MASTER)
    set_matmul(loaded.model, matmul, compute)
    return loaded.model, loaded.tokenizer


# --- a run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """The length of a run, and the data that it learns from."""

    steps: int
    tokens_per_step: int  # the tokens that the printed speed counts; RL counts replies instead
    items_per_step: int  # rows or problems that each step consumes
    data: str  # the name of the data; a run resumes only with the same data


def sum_of_losses(model: nn.Module, idx: Tensor, targets: Tensor) -> Tensor:  # (B, T) -> ()
    """Return the summed loss in nats of a forward pass in which every row is one sequence."""
    return model(idx, targets, reduction="sum")


class Profiler(Protocol):
    """Measures the time of each part of a step (Protocol)."""

    def begin_step(self) -> None: ...

    def mark(self, name: str) -> None: ...

    def end_step(self) -> None: ...


class NoProfile:
    """The profiler of a run without --profile, which does nothing."""

    def begin_step(self) -> None:
        """Do nothing."""

    def mark(self, name: str) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""


def profiling() -> Any:
    """Return the module that profiles a run.

    Raises UserError (exit code 2) if its file is not in this copy of nanochat.
    """
    return required_appendix("nanochat.runtime.profiling", "--profile")


class Run:
    """A training run, new or resumed. Every rank creates one and calls the same methods.

    When its context ends without an exception, the run waits for the last checkpoint, writes the
    stage's section of the report if all steps are done and measured, and logs where the checkpoints
    are. After a signal, the run completes and saves its current update, and `ended` becomes true.
    """

    def __init__(
        self,
        folder: RunFolder,
        plan: Plan,
        model: Model,
        tokenizer: Tokenizer,
        optimizers: Optimizers,
        flags: RunFlags,
        compute: Compute,
        facts: Mapping[str, Any] | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        """Load the checkpoint to resume from, if there is one, into `model` and `optimizers`.

        `facts` are added to the report, and `about` to the meta.json of checkpoints. Raises
        UserError if the run cannot be resumed as the flags ask, or if --run or --profile cannot be
        used.
        """
        self.folder = folder
        self.plan = plan
        self.model = model
        self.tokenizer = tokenizer
        self.optimizers = optimizers
        self.flags = flags
        self.compute = compute
        self.facts = dict(facts or {})
        self.about = dict(about or {})
        self._module = cast(nn.Module, model)
        self._fast = self._module  # replaced by prepare()

        resumed = self._resume()
        self.step = resumed.step  # number of updates done
        self._first = resumed.step
        self._stop = self._last_step()
        self._state = resumed.state
        self.meter, self.safeguards = self._figures(resumed)
        if self.step:
            self._announce(self.meter.expected(self.step))

        run_name = f"{folder.stage}-{folder.tag}"
        self._tracker = Tracker(
            folder.path,
            flags.run,
            folder.settings.values,
            self.step,
            compute.main,
            flags.track,
            run_name,
        )
        if compute.main:
            self._describe()
        self._line = self._owed_line()
        self._saved = True  # whether the line's step is on disk or needs no checkpoint
        self._cut = False  # whether a signal cut a measurement short
        self._signalled = False  # whether a signal ends the run after a step of this process
        self._clock = SaveClock(flags.save_seconds)
        self._saver = Saver(compute, flags.keep, flags.checkpoint_files, self._clock.saved)
        compute.ending.push(self._saver)
        optimizers.before_step = self._saver.settle
        self._profile: Profiler = NoProfile()
        if flags.profile:
            steps_left = self._stop - self.step
            self._profile = profiling().Profile(folder.stage, folder.path, steps_left, compute)
        self._step_start = (0.0, 0.0)  # wall-clock seconds, CPU seconds of this process
        self._progress = Progress(
            folder.stage, plan.steps, tr("steps"), completed=self.step, shown=compute.main
        )

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None and self._signalled:
            self._saver.wait()
            log(
                tr(
                    "{stop_reason}: saved step {step:,} and stopping",
                    stop_reason=self.compute.pulse.stop_reason,
                    step=self.step,
                )
            )
        self._progress.close()
        if kind is None:
            self._close()

    # --- the beginning ---------------------------------------------------------------------------

    def _last_step(self) -> int:
        return min(self.flags.stop_at or self.plan.steps, self.plan.steps)

    def _resume(self) -> Resumed:
        """Lock the folder, load any checkpoint to resume from, and return its step and state.

        Without a checkpoint, the step is 0 and the state is empty.
        """
        flags = self.flags
        path = self.folder.path
        if "lora" in self.about:
            refuse_parts_of_adapter(flags.checkpoint_files)
        if flags.resume != "auto":  # check --profile before later steps are moved aside
            first = 0 if flags.resume == "none" else flags.resume
            if flags.profile:
                profiling().check(self._last_step() - first)
        hold(path, self.compute)
        # The other ranks wait while rank 0 reads all files of a checkpoint to hash them.
        self.compute.pulse.rest()
        return resume_stage(
            path,
            self._module,
            self.optimizers,
            self.folder.settings,
            self.compute,
            self.plan.data,
            flags.resume,
            flags.other_code,
            (self.plan.steps, self.plan.items_per_step),
        )

    def _figures(self, resumed: Resumed) -> tuple[Meter, Safeguards]:
        """Return the meter and the safeguards, with any state that the checkpoint has saved.

        Raises UserError if the state has a field that this version does not know.
        """
        plan = self.plan
        flops = self.model.flops_per_token()
        state = resumed.state
        try:
            meter = Meter.start(plan.steps, plan.tokens_per_step, flops, self.compute, state)
            return meter, Safeguards.start(self.compute, state)
        except TypeError as unknown:  # a field that this version does not have
            raise UserError(
                tr(
                    "the checkpoint of step {step:,} in {path} holds figures that this "
                    "version does not know ({unknown}). Resume with the version of nanochat "
                    "that wrote the checkpoint, or begin again with --resume=none.",
                    step=resumed.step,
                    path=self.folder.path,
                    unknown=unknown,
                )
            ) from unknown

    def _predicted(self, batch: Batch) -> float:
        """Return the seconds of a step, as the planner predicts them or else by the usual MFU."""
        planner = appendix("nanochat.planner.expected")
        seconds = None
        if planner is not None:
            rows = batch.device_batch_size
            seconds = planner.of_model(self.model, rows, batch.passes, self.compute)
        return self.meter.expected(0) / self.plan.steps if seconds is None else seconds

    def _announce(self, seconds: float) -> None:
        """Log the expected time unless it is under a minute; warn if a CPU needs over an hour."""
        if seconds >= ANNOUNCED_SECONDS:
            log(
                tr(
                    "time: about {seconds} for {steps:,} steps",
                    seconds=duration(seconds),
                    steps=self.plan.steps - self.step,
                )
            )
        sizes.warn_of_time(seconds, self.folder.stage, self.compute)

    def _describe(self) -> None:
        """Write run.json, and discard samples of later steps left by an interrupted run."""
        forget_samples(self.folder.path, self.step)
        about = {"stage": self.folder.stage, "tag": self.folder.tag, "steps": self.plan.steps}
        describe_run(self.folder.path, {**about, **self._where()})

    def _where(self) -> dict[str, Any]:
        """Return a dict of what reports say about the model, the device and the data."""
        total = self.model.parameter_counts()["total"]
        return {**device.summary(self.compute, total), **self.facts}

    def _owed_line(self) -> dict[str, Any] | None:
        """Return the resumed step's line if metrics.jsonl still lacks it, else None.

        A run that was stopped right after a save has not yet measured that step. At step 0 the line
        is {"step": 0}, which is written only if something is measured before the first step.
        """
        owed = parallel.agree(int(self._tracker.last < self.step), self.compute)
        if self.step == 0:
            return {"step": 0}
        return self._state.get("line") if owed else None

    def prepare(
        self,
        rows: Source,
        batch: Batch,
        loss: PassLoss = sum_of_losses,
        step_seconds: float | None = None,
    ) -> nn.Module:
        """Return the model to train with: captured as a graph, compiled or unchanged.

        The expected time of a new run is announced first. It follows from `step_seconds`, the
        predicted seconds of a step, if the script knows them.

        With --graphs, the model is captured. Otherwise it is compiled with --compile or, by
        default, if compiling pays off. `loss` must call the model as the training loop does,
        because other arguments would compile another graph. A signal interrupts compilation at once
        by raising signals.Stopped.
        """
        if not self.step:
            if step_seconds is None:
                step_seconds = self._predicted(batch)
            self._announce(self.plan.steps * step_seconds)
        compute = self.compute
        length = rows.row_tokens - 1
        shape = (batch.device_batch_size, length)
        if self.flags.graphs:
            self._fast = graphs.GraphedModel(self._module, shape, compute)
            self.optimizers.capture(compute.platform)
            return self._fast
        first_row = self.step * batch.rows_per_step
        trial = dataloader.make_step(
            rows, first_row, batch.rows_per_step, batch.device_batch_size, compute
        )

        def one_pass(model: nn.Module) -> Tensor:
            tensors = (device.to_device(tensor, compute) for tensor in trial.micro_batches[0])
            return loss(model, *tensors)

        self._fast = compiled(
            self._module,
            self.flags.compile,
            shape,
            compute,
            self.model.compile_groups(),
            self._ahead(batch),
            one_pass,
        )
        return self._fast

    def _ahead(self, batch: Batch) -> Ahead:
        """Return the training that is left, which decides whether compiling pays off."""
        tokens_flops = self.model.flops_per_token() * self.plan.tokens_per_step
        # runs without this entry in their checkpoints were always compiled
        as_before = self._state.get("compiled", self.step > 0)
        return Ahead(
            self._stop - self.step, batch.passes, tokens_flops / self.meter.peak, as_before
        )

    def batches(self, rows: Source, batch: Batch) -> Iterator[dataloader.Step]:
        """Return an endless iterator over the data of this rank's steps, from the next one on."""
        first_row = self.step * batch.rows_per_step
        return dataloader.steps(
            rows, first_row, batch.rows_per_step, batch.device_batch_size, self.compute
        )

    # --- the loop --------------------------------------------------------------------------------

    def steps(self) -> Iterator[int]:
        """Yield the number of updates done so far, until the caller leaves the loop.

        Check Run.ended to find out when to leave it.
        """
        try:
            signals.check(self.compute)
        except signals.Stopped:
            self._stop = self.step
            self._cut = True
        self._clock.saved(cost=0.0)  # the time until the next save starts now
        while True:
            step = self.step
            yield step
            assert self.step == step + 1, "a step of the loop must end with finish(), or leave it"

    @property
    def ended(self) -> bool:
        """True if this process has no further update to do."""
        return self.step >= self._stop

    @contextlib.contextmanager
    def between_steps(self, every: int, ends: bool = False) -> Iterator[bool]:
        """Yield whether to measure now, and write the latest step's metrics after the block.

        A measurement is due every `every` steps and at the end of the run, but never if `every` is
        0. With `ends`, it is due before the first step and at the end in any case. No step is
        measured twice. If a signal cuts a measurement short, the next start of the run repeats it.
        The clock of the next step starts after the block.
        """
        try:
            yield self.must_measure(every, ends)
            self._flush()
        except signals.Stopped:
            self._cut = True
            self._stop = self.step
            if self.step > self._first:
                self._signalled = True
                if not self._saved:
                    self._save()
        if not self.ended:
            self._profile.begin_step()
            self._step_start = (time.perf_counter(), time.process_time())

    def must_measure(self, every: int, ends: bool = False) -> bool:
        """Return whether between_steps() would measure now with these arguments."""
        if self._line is None or self._cut:
            return False
        last = self.step == self.plan.steps
        if ends and (last or self.step == 0):
            return True
        return due(self.step, every, last and not ends)

    def record(self, **figures: float) -> None:
        """Add measured figures to the latest step's metrics."""
        assert self._line is not None, "figures belong into a block of between_steps() that is due"
        self._line |= figures

    def _flush(self) -> None:
        """Write the latest step's line to metrics.jsonl, if it is complete and not written yet."""
        if self._line is None or self._cut:
            return
        if len(self._line) > 1:
            self._tracker.log(**self._line)
        self._line = None

    def update(self, num_targets: int, figures: Sequence[str] = ()) -> Update:
        """Return the next update; step.Update describes the arguments."""
        return Update(
            self._module,
            self.optimizers,
            self.safeguards,
            num_targets,
            self.compute,
            figures,
            self.mark,
        )

    def mark(self, phase: str) -> None:
        """Begin a phase of the step; --profile attributes the time from now on to it."""
        self._profile.mark(phase)

    def finish(
        self,
        outcome: Outcome,
        lrm: float,
        figures: Mapping[str, float] | None = None,
        words: str = "",
    ) -> None:
        """Count a step as done, show it, and save it if a save is due or a signal has come.

        `lrm` is the factor on the learning rates. `figures` and the outcome's figures are added to
        the step's line in metrics.jsonl; `words` and the outcome's figures are printed after the
        step. Saving comes before measuring, because measuring may fail.
        """
        self._line = self._count(outcome, lrm, figures or {})
        note = " | ".join(filter(None, (words, listed(outcome.figures))))
        if note:
            log(f"step {self.step:05d} | {note}")
        self._signalled = signals.agreed(self.compute)
        self._saved = self._save_due() or self._signalled
        if self._saved:
            self._save()
        if self._signalled:
            self._stop = self.step

    def _count(self, outcome: Outcome, lrm: float, figures: Mapping[str, float]) -> dict[str, Any]:
        """Count the step as done, show it, and return its line for metrics.jsonl."""
        seconds = time.perf_counter() - self._step_start[0]
        cpu_seconds = time.process_time() - self._step_start[1]
        self.step += 1
        self.compute.pulse.beat(self.step)
        self._profile.end_step()
        line = self.meter.tick(self.step, outcome, seconds, cpu_seconds, lrm)
        line["memory_gb"] = device.memory_peak(self.compute) / 1e9
        line |= {**outcome.figures, **figures}
        steps = self.plan.steps
        eta = self.meter.eta(self.step)
        self._progress.show(self.step, step_note(line, steps, eta), step_line(line, steps, eta))
        return line

    def _save_due(self) -> bool:
        last = self.step == self._stop
        if last or due(self.step, self.flags.save_every, last):
            return True
        return self._clock.due(self.compute, self._saver.busy, self._saver.failed)

    def _save(self) -> None:
        """Save the latest step in the background; with --graphs, wait until its state is copied."""
        assert self._line is not None
        state = {
            "meter": self.meter.state(),
            "line": dict(self._line),
            **self.safeguards.state(),
            "row": self.step * self.plan.items_per_step,
            "data": self.plan.data,
            "compiled": is_compiled(self._fast, self.model.compile_groups()),
        }
        settings = self.folder.settings.values
        meta = make_meta(self.folder.stage, self.model.config, settings, self.plan.steps, state)
        self._saver.save(
            self.folder.path,
            self.step,
            self._module,
            self.optimizers,
            self.tokenizer,
            meta | self.about,
        )
        if self.flags.graphs:  # no other thread may use the device while a graph is captured
            self._saver.settle()

    # --- the end ---------------------------------------------------------------------------------

    def _close(self) -> None:
        """Close the tracker, await the last save, report a complete stage, and log the folder."""
        self._tracker.close()
        self._saver.wait()
        folder = self.folder
        is_complete = self.step == self.plan.steps
        report = appendix("nanochat.report.sections")
        if is_complete and not self._cut and self.compute.main and report is not None:
            settings = folder.settings.values
            where = self._where()
            report.training_section(folder.stage, folder.tag, folder.path, settings, where)
        if is_complete:
            log(tr("checkpoints: {folder}", folder=folder.path))
        else:
            how = self._how_to_resume()
            log(
                tr(
                    "checkpoints: {folder} (stopped at step {step}; {how})",
                    folder=folder.path,
                    step=self.step,
                    how=how,
                )
            )
        if is_complete and not self._cut:
            next_commands.show(folder.stage, folder.tag)

    def _how_to_resume(self) -> str:
        left_out = [] if self.compute.pulse.stop_reason else ["--stop_at"]
        if self.flags.resume != "auto":  # the same command would start from the named step again
            left_out.append(f"--resume={self.flags.resume}")
        if not left_out:
            return tr("type the same command to resume")
        if len(left_out) == 1:
            return tr("leave {flag} out to resume", flag=left_out[0])
        return tr("leave {first} and {second} out to resume", first=left_out[0], second=left_out[1])


def launch(
    train: Callable[[Any, Compute], None], config: type[Any], description: str | None
) -> None:
    """Run a training script: parse its flags, open the device, and call `train`.

    Signals make the run save and stop, and the ranks watch each other.
    """

    def main(cfg: Any) -> None:
        def work(_: RunFlags, compute: Compute) -> None:
            with contextlib.suppress(AlreadyDone), compute.ending:  # finished() has logged it
                train(cfg, compute)

        guarded(work)(cfg.run)

    run(main, config, description, OLD_FLAGS)
