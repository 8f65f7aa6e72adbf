"""One training stage, from its first check to its section of the report: what base, mid, SFT and RL do alike.

A script keeps its own loop:

    for step in stage.train_rows(rows, ...):
        stage.schedule(lrm, momentum)
        stage.conclude(stage.update(step))
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch.nn as nn
from torch import Tensor

from nanochat import dataloader, device
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import Parent, checkpoint_dir, find_parent, make_meta
from nanochat.checkpoint_manager.parts.background import Saver
from nanochat.checkpoint_manager.resume import finished, hold, resume_stage, rows_per_step
from nanochat.checkpoint_manager.same_run import RunSettings
from nanochat.checkpoint_manager.save import refuse_parts_of_adapter
from nanochat.common import UserError, log, run
from nanochat.dataloader import Source, Step
from nanochat.device import Compute
from nanochat.evals import loss
from nanochat.gpt import GPT
from nanochat.model import Model
from nanochat.report.samples import forget_samples
from nanochat.report.sections import has_training_section, training_section
from nanochat.runtime import fingerprint, graphs, parallel, profiling, signals
from nanochat.runtime.progress import Progress, duration
from nanochat.runtime.trackers.jsonl import describe_run
from nanochat.runtime.tracking import Tracker, parse_trackers
from nanochat.runtime.watch import guarded
from nanochat.tokenizer import Tokenizer
from nanochat.train import samples, sizes
from nanochat.train.compile import Ahead, compiled, is_compiled, missing
from nanochat.train.fit import probe
from nanochat.train.flags import EpochFlags, Epochs, RunFlags, StageFlags
from nanochat.train.meter import Meter, SaveClock, due, listed, step_line, step_note
from nanochat.train.optim import OneRate, Optimizers, Rates, saved_bytes
from nanochat.train.sizes import Batch
from nanochat.train.update import (
    CrossEntropy,
    LossScale,
    MicroBatches,
    Objective,
    Outcome,
    Spikes,
    forward,
    measure,
    update,
)

Line = dict[str, Any]  # the figures of a step, as metrics.jsonl keeps them


@dataclass(frozen=True)
class Work:
    """What a stage does in each of its steps."""

    steps: int
    tokens_per_step: int  # what the printed speed counts; RL counts replies instead
    items_per_step: int  # rows or problems: after n steps the data stands at n times as many
    key: str  # names the data; a run resumes only with the same
    eval_every: int  # steps between measurements
    measure: Callable[[Line], None]  # adds a measurement to a step's line
    measures_first: bool = False  # measure before the first step too


class AlreadyDone(Exception):
    """An earlier run has finished this stage with these settings; launch() ends the script without an error."""


class Stage:
    """A stage's folder, settings, model, optimizers and figures. Every rank makes one and calls the same methods."""

    def __init__(self, name: str, flags: RunFlags, compute: Compute, tag: str, **facts: str):
        """`facts` (corpus, parent, tokenizer) join the flags as the settings that a resumed run must share.

        AlreadyDone if an earlier run finished the stage. UserError if the device cannot train, if the ranks were not
        started alike, or if the settings differ from those of the checkpoints that are there.
        """
        if why := compute.platform.cannot_train():
            raise UserError(why)
        parse_trackers(flags.track, flags.run)  # refuses a wrong list before anything is read
        self.name, self.flags, self.compute, self.tag = name, flags, compute, tag
        self.folder = checkpoint_dir(name, tag)
        self.settings = RunSettings.of(flags, **facts)
        self.parent: Parent | None = None
        self.objective: Objective = CrossEntropy()
        self.step = self.total = 0  # updates done, and of the whole run
        self.facts: dict[
            str, Any
        ] = {}  # what the report's section says besides; the script may add to them
        self.about: dict[
            str, Any
        ] = {}  # what the meta.json of a checkpoint says besides; the script may add to it
        self._cut = False  # a signal cut a measurement short
        fingerprint.check_start(self.settings.values, compute)
        if flags.graphs:  # what cannot be done is refused before an earlier run is moved aside
            graphs.check(compute, flags.compile)
        elif flags.compile:
            missing(True, compute)
        if finished(
            self.folder, self.settings, compute, has_training_section(name, tag), flags.resume
        ):
            raise AlreadyDone
        self.begun_rows = rows_per_step(self.folder, flags.resume, compute)

    @classmethod
    def after(
        cls, source: str, step: int | None, name: str, flags: EpochFlags, compute: Compute
    ) -> "Stage":
        """A stage that starts from the checkpoint of an earlier stage: the newest, or the one of `step`."""
        parent = find_parent(source, flags.model_tag, step)
        tag = flags.saved_as(parent.tag)
        log(
            f"{name}: training the model {parent.tag} of stage {parent.stage}, step {parent.step:,}; "
            f"checkpoints go to {checkpoint_dir(name, tag)}"
        )
        stage = cls(
            name, flags, compute, tag, parent=parent.identity, corpus=flags.data or parent.corpus
        )
        stage.parent = parent
        return stage

    @property
    def corpus(self) -> str:
        """The corpus by name, or the mixture."""
        return self.settings.values["corpus"]

    def load_parent(self) -> tuple[Model, Tokenizer]:
        """The parent's model with fp32 masters, and its tokenizer."""
        assert self.parent is not None, "only a stage made by after() has a parent"
        loaded = load_model(
            self.parent.stage, self.parent.tag, self.parent.step, self.compute, dtype=device.MASTER
        )
        return loaded.model, loaded.tokenizer

    # --- getting ready ---------------------------------------------------------------------------

    def steps_over(self, rows: Source, rows_per_step: int, name: str) -> int:
        """How many steps the flags ask for on these rows, which are called `name`; logs it."""
        steps = cast(Epochs, self.flags).steps(rows.count, rows_per_step)
        log(f"data: {name}, {rows.count:,} rows of {rows.row_tokens - 1} tokens; {steps:,} steps")
        return steps

    def set_up(
        self,
        model: Model,
        tokenizer: Tokenizer,
        rates: Rates | OneRate,
        scale: float,
        table_momentum: float = 0.8,
        fill: Callable[[], None] | None = None,
    ) -> None:
        """Shard the model over the ranks as --shard says, and make its optimizers.

        `scale` multiplies every learning rate. A model that was built on meta gets its parameters from `fill`, after it
        was sharded, so that no rank holds more than its share. train_rows() must follow, or resume() and begin().
        """
        self.model, self.tokenizer = model, tokenizer
        self._module = self._fast = cast(
            nn.Module, model
        )  # update() runs the latter, which train_rows() compiles
        self.counts, self.flops = model.parameter_counts(), model.flops_per_token()
        shape = model.config
        kept = sum(parameter.numel() for _, parameter in parallel.trained(self._module))
        part = f" of which {kept:,} are trained," if kept < self.counts["total"] else ""
        log(
            f"model: {shape.n_layer} layers, {shape.n_embd} channels, vocabulary {shape.vocab_size:,}, "
            f"{self.counts['total']:,} parameters,{part} {self.flops:,} FLOPs a token"
        )
        if (
            not part
            and isinstance(model, GPT)
            and (how := self.compute.operations.coarser(self.compute.dtype))
        ):
            log(
                f"the uncompiled GPT trains in {how}; NANOCHAT_INT8=0 lets it train in bfloat16 alone"
            )
        sizes.check_disk(self.folder, kept, saved_bytes(model, rates), self.flags.keep)
        parallel.shard(self._module, model.shard_groups(), self.compute, self.flags.shard)
        if fill is not None:
            fill()
        self.optimizers = Optimizers(
            self._module,
            model.parameter_roles(),
            model.config.n_embd,
            rates,
            scale,
            self.compute.dtype,
            table_momentum,
        )

    def train_rows(
        self,
        rows: Source,
        batch: Batch,
        steps: int,
        val_rows: Source,
        eval_every: int,
        val_tokens: int | None = None,
        of_what: str = "",
        objective: Objective | None = None,
        measures_first: bool = False,
    ) -> Iterator[Step]:
        """Resume, and get ready to train on rows of tokens; gives the batches of the steps to come.

        Validation measures bits per byte, or the `objective` if one is given, on `val_tokens` tokens, by default 20
        steps' worth, and keeps what the model says to held-out prompts. With `measures_first` it measures before the
        first step too. On an accelerator the batch is fitted to its
        memory. The model is compiled where compilation pays.
        """
        self.objective = objective or self.objective
        tokens = val_tokens or 20 * batch.tokens_per_step
        asked = self.flags.samples if isinstance(self.flags, StageFlags) else 0
        prompts = samples.held_out_prompts(val_rows, asked, self.tokenizer)

        def validate(line: Line) -> None:
            val = dataloader.one_pass(val_rows, tokens, batch.device_batch_size, self.compute)
            self._module.eval()  # without dropout
            if objective is None:
                line["val_bpb"] = loss.bits_per_byte(
                    self.model, val, self.tokenizer.token_bytes(), self.compute
                )
                words = f"{line['val_bpb']:.4f} bits per byte{of_what}"
            else:
                found = measure(objective, self._module, val, self.compute)
                line |= {f"val_{name}": value for name, value in found.items()}
                words = listed(found)
            self._module.train()
            log(f"step {line['step']:05d} | validation: {words}")
            samples.keep_replies(
                self.folder, line["step"], prompts, self.model, self.tokenizer, self.compute
            )

        work = Work(
            steps,
            batch.tokens_per_step,
            batch.rows_per_step,
            rows.key,
            eval_every,
            validate,
            measures_first,
        )
        self.resume(work)
        self._announce()
        T = rows.row_tokens - 1
        batch = probe.fit(batch, self._module, self.optimizers, T, self.compute)
        shape, groups = (batch.device_batch_size, T), self.model.compile_groups()
        first = self.step * batch.rows_per_step
        left = min(self.flags.stop_at or steps, steps) - self.step
        least = (
            self.flops * work.tokens_per_step / self.meter.peak
        )  # seconds of a step at the device's peak
        before = self._state.get(
            "compiled", self.step > 0
        )  # checkpoints without this entry compiled in any case
        ahead = Ahead(left, batch.passes, least, before)
        if self.flags.graphs:
            self._fast = graphs.GraphedModel(self._module, shape, self.compute)
            self.optimizers.capture(self.compute.platform)
        else:
            trial = dataloader.make_step(
                rows, first, batch.rows_per_step, batch.device_batch_size, self.compute
            )

            def one_pass(model: nn.Module) -> Tensor:
                return forward(
                    model, trial.micro_batches[0], trial.extras, self.objective, self.compute
                )[0]

            self._fast = compiled(
                self._module, self.flags.compile, shape, self.compute, groups, ahead, one_pass
            )
        self.begin()
        batches = dataloader.steps(
            rows, first, batch.rows_per_step, batch.device_batch_size, self.compute
        )
        while self.next_step():
            yield next(batches)

    def resume(self, work: Work) -> None:
        """Load the checkpoint to resume from, if there is one, and the figures that it holds."""
        flags, compute = self.flags, self.compute
        if "lora" in self.about:
            refuse_parts_of_adapter(flags.checkpoint_files)
        if flags.resume != "auto":  # refused before later steps are moved aside
            first = 0 if flags.resume == "none" else flags.resume
            profiling.check(flags.profile, min(flags.stop_at or work.steps, work.steps) - first)
        hold(self.folder, compute)
        resumed = resume_stage(
            self.folder,
            self._module,
            self.optimizers,
            self.settings,
            compute,
            work.key,
            flags.resume,
            flags.other_code,
            (work.steps, work.items_per_step),
        )
        self.work, self.step, self.total, self._state = (
            work,
            resumed.step,
            work.steps,
            resumed.state,
        )
        try:
            self.meter = Meter.start(
                work.steps, work.tokens_per_step, self.flops, compute, resumed.state
            )
            self.scale, self.spikes = (
                LossScale.start(compute, resumed.state),
                Spikes.start(resumed.state),
            )
        except TypeError as unknown:  # a field that this version does not have
            raise UserError(
                f"the checkpoint of step {resumed.step:,} in {self.folder} holds figures that this version does not "
                f"know ({unknown}). Resume with the version of nanochat that wrote the checkpoint, or begin again with "
                "--resume=none."
            ) from unknown

    def _announce(self) -> None:
        """Say how long the run will take, before its first step; warn if that is long."""
        if (
            seconds := self.meter.expected(self.step)
        ) >= 60:  # a guess from the device's peak says nothing about less
            log(f"time: about {duration(seconds)} for {self.total - self.step:,} steps")
        sizes.warn_of_time(seconds, self.compute)

    def begin(self) -> None:
        """Open log, progress and profile. Then measure what is due before the next step: the measurement that a run
        missed when it was stopped right after a save, or the one before the first step."""
        flags, compute = self.flags, self.compute
        self.stop = min(flags.stop_at or self.total, self.total)
        shown = f"{self.name}-{self.tag}"
        self.tracker = Tracker(
            self.folder, flags.run, asdict(flags), self.step, compute.main, flags.track, shown
        )
        if compute.main:
            forget_samples(self.folder, self.step)
            describe_run(
                self.folder,
                {"stage": self.name, "tag": self.tag, "steps": self.total, **self._where()},
            )
        owed = (
            self._state.get("line")
            if parallel.agree(int(self.tracker.last < self.step), compute)
            else None
        )
        self.progress = Progress(
            self.name, self.total, "steps", completed=self.step, shown=compute.main
        )
        self._clock = SaveClock(flags.save_seconds)
        self._saver = Saver(compute, flags.keep, flags.checkpoint_files, self._clock.saved)
        compute.ending.push(self._saver)
        self.optimizers.before_step = self._saver.settle
        self.profile = profiling.begin(
            flags.profile, self.name, self.folder, self.stop - self.step, compute
        )
        line = owed or ({"step": 0} if self.work.measures_first and self.step == 0 else None)
        try:
            signals.check(compute)
            if line:
                self._finish(line)
        except signals.Stopped:
            self.stop, self._cut = self.step, True

    # --- a step ----------------------------------------------------------------------------------

    def next_step(self) -> bool:
        """Whether there is another step, whose time begins now; after the last step the stage is closed."""
        if self.step >= self.stop:
            self._close()
            return False
        self.profile.begin_step()
        self._mark = (time.perf_counter(), time.process_time())
        return True

    def schedule(self, lrm: float, momentum: float = 0.95, decay: float = 1.0) -> None:
        """Set this step's factor on all learning rates, Muon's momentum, and the factor on the matrices' decay."""
        self._lrm = lrm
        self.optimizers.schedule(lrm, momentum, decay)

    def update(self, step: MicroBatches) -> Outcome:
        """One optimizer update; see update.update()."""
        return update(
            self._fast,
            self.optimizers,
            step,
            self.scale,
            self.compute,
            self.spikes,
            self.mark,
            self.objective,
        )

    def mark(self, part: str) -> None:
        """Count the time from here on to a part of the step; without --profile nothing happens."""
        self.profile.mark(part)

    def conclude(
        self, outcome: Outcome, figures: Mapping[str, float] | None = None, words: str = ""
    ) -> None:
        """End a step: show it, save if a save is due, then measure and log.

        `figures`, and those of the objective, join the step's line in metrics.jsonl; `words` and the objective's
        figures are printed behind it. Saving comes before measuring, which may fail. When a signal has
        asked for the end, even in the middle of a measurement, the step is saved and the stage stops; the next run
        makes up the measurement.
        """
        line = {**self._tick(outcome), **outcome.figures, **(figures or {})}
        if words := " | ".join(filter(None, (words, listed(outcome.figures)))):
            log(f"step {self.step:05d} | {words}")
        asked = signals.agreed(self.compute)
        saved = self._save_due() or asked
        if saved:
            self._save(line)
        try:
            self._finish(line)
        except signals.Stopped:
            asked = self._cut = True
            if not saved:
                self._save(line)
        if asked:
            self.stop = self.step
            self._saver.wait()
            log(f"{self.compute.pulse.stop_reason}: saved step {self.stop:,} and stopping")

    def _tick(self, outcome: Outcome) -> Line:
        """Count the step as done and show it; returns its figures."""
        seconds, cpu = time.perf_counter() - self._mark[0], time.process_time() - self._mark[1]
        self.step += 1
        self.compute.pulse.beat(self.step)
        self.profile.end_step()
        line = self.meter.tick(self.step, outcome, seconds, cpu, self._lrm)
        line["memory_gb"] = device.memory_peak(self.compute) / 1e9
        steps, eta = self.total, self.meter.eta(self.step)
        self.progress.show(self.step, step_note(line, steps, eta), step_line(line, steps, eta))
        return line

    def _save_due(self) -> bool:
        last = self.step == self.stop
        return (
            last
            or due(self.step, self.flags.save_every, last)
            or self._clock.due(self.compute, self._saver.busy, self._saver.failed)
        )

    def _save(self, line: Line) -> None:
        """Begin to save the step of a line, beside training."""
        state = {
            "meter": self.meter.state(),
            "line": dict(line),
            "scale": self.scale.state(),
            "norms": self.spikes.norms,
            "row": line["step"] * self.work.items_per_step,
            "data": self.work.key,
            "compiled": is_compiled(self._fast, self.model.compile_groups()),
        }
        meta = (
            make_meta(self.name, self.model.config, self.settings.values, self.total, state)
            | self.about
        )
        self._saver.save(
            self.folder, line["step"], self._module, self.optimizers, self.tokenizer, meta
        )
        if self.flags.graphs:  # no other thread may use the device while a graph is captured
            self._saver.settle()

    def _finish(self, line: Line) -> None:
        """Measure if a measurement is due, and log the line."""
        step, work = line["step"], self.work
        ends = work.measures_first and step in (0, self.total)
        if ends or due(step, work.eval_every, step == self.total and not work.measures_first):
            work.measure(line)
        self.tracker.log(**line)

    # --- the end ---------------------------------------------------------------------------------

    def _close(self) -> None:
        """Close log and progress, wait for the last checkpoint, write the section of the report if all steps are done
        and measured, and say where the checkpoints are."""
        self.progress.close()
        self.tracker.close()
        self._saver.wait()
        done = self.step == self.total
        if done and not self._cut and self.compute.main:
            training_section(self.name, self.tag, self.folder, self.settings.values, self._where())
        left_out = [] if self.compute.pulse.stop_reason else ["--stop_at"]
        if self.flags.resume != "auto":  # the same command would begin there again
            left_out.append(f"--resume={self.flags.resume}")
        how = (
            f"leave {' and '.join(left_out)} out to resume"
            if left_out
            else "type the same command to resume"
        )
        log(
            f"checkpoints: {self.folder}"
            + ("" if done else f" (stopped at step {self.step}; {how})")
        )

    def _where(self) -> dict[str, Any]:
        return {**device.summary(self.compute, self.counts["total"]), **self.facts}


def launch(
    train: Callable[[Any, Compute], None], config: type[Any], description: str | None
) -> None:
    """Run a training script: parse its flags, take the device, and train with signals caught and ranks watched."""

    def main(cfg: Any, compute: Compute) -> None:
        with contextlib.suppress(AlreadyDone), compute.ending:  # finished() has logged it
            train(cfg, compute)

    run(guarded(main), config, description)
