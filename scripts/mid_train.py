"""Midtraining: the base model learns the form of a chat, tools and tasks; every token is trained.

python -m scripts.mid_train
torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from nanochat import dataloader, device, report
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent, make_meta
from nanochat.checkpoint_manager.resume import finished, resume_stage
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.common import log, run, settings
from nanochat.data import mixing
from nanochat.dataloader import split_rows
from nanochat.device import Compute
from nanochat.evals import loss as loss_eval
from nanochat.runtime import fingerprint, parallel, watch
from nanochat.train import compile as compiling
from nanochat.train import loop, probe, schedule, sizes
from nanochat.train.optim import Optimizers, Rates
from tasks.mixtures import mix

Auto = Literal["auto"]


@dataclass(frozen=True)
class Config(loop.StageFlags, Rates):
    """Flags of midtraining; the model is the base stage's."""

    data: str | None = None
    """corpus whose conversations and documents to train on; default: the model's, with the weights of a mixture"""
    base_step: int | None = None
    """step of the base checkpoint; default the newest"""
    conversations: str | None = None
    """a JSONL file of one's own conversations, instead of the mixture"""
    documents_every: int | Auto = "auto"
    """one row in so many is of the base corpus, so that it is not forgotten; 0 = none; auto: 4 for TinyWorld, else 0"""
    num_epochs: float = 1.0
    """passes over the mixture"""
    num_iterations: int | None = None
    """steps; takes precedence over num_epochs"""
    total_batch_size: int | Auto = "auto"
    """tokens of a step, over all devices; auto: 524,288, for TinyWorld 8,192"""
    device_batch_size: int | Auto = "auto"
    """rows of a pass on one device, at most; auto: what its memory holds"""
    gradient_accumulation_steps: int | None = None
    """passes of a step; follows from total_batch_size and device_batch_size, and must agree with them if given"""
    init_lr_frac: float = 1.0
    """factor on all learning rates"""
    weight_decay: float = 0.0
    """Muon's decay"""
    warmdown_ratio: float = 0.2
    """the last part of the run, in which the learning rate falls to 0"""
    eval_every: int = 150
    """steps between validations; 0 = never"""


def train(cfg: Config, compute: Compute) -> None:
    """Train over the mixture, going on from the newest checkpoint if there is one."""
    loop.begin(cfg, compute)
    parent = find_parent("base", cfg.model_tag, cfg.base_step)
    folder = checkpoint_dir("mid", parent.tag)
    corpus = cfg.data or parent.corpus
    wanted = {**settings(cfg), "parent": parent.identity, "corpus": corpus}
    fingerprint.check_start(wanted, compute)
    if finished(folder, wanted, compute, report.has_training_section("mid", parent.tag), cfg.resume):
        return
    loaded = load_model("base", parent.tag, parent.step, compute, dtype=device.MASTER)
    model, tokenizer, shape = loaded.model, loaded.tokenizer, loaded.model.config
    counts, flops, T = model.parameter_counts(), model.flops_per_token(), shape.sequence_len

    batch = sizes.batch(cfg.total_batch_size, cfg.device_batch_size, shape, counts["total"], None, corpus, compute,
                        cfg.gradient_accumulation_steps)  # fmt: skip
    mixture = mix("mid", corpus, cfg.seed, cfg.conversations)
    rows = dataloader.conversation_rows("mid", mixture.train, mixture.key, tokenizer, T, cfg.seed, masked=False)
    val_rows = dataloader.conversation_rows("mid-val", mixture.val, mixture.key, tokenizer, T, cfg.seed, masked=False)
    every = (4 if corpus == "tinyworld" else 0) if cfg.documents_every == "auto" else cfg.documents_every
    if every:
        documents = split_rows(mixing.resolve_data(corpus), tokenizer, "train", T, cfg.seed)
        rows = dataloader.blend(rows, documents, every)
    steps = cfg.num_iterations or max(int(cfg.num_epochs * rows.count) // batch.rows_per_step, 1)
    log(f"mixture: {mixture.name}{f' and one row in {every} of {corpus}' if every else ''}, "
        f"{rows.count:,} rows of {T} tokens; {steps:,} steps")  # fmt: skip

    parallel.shard(model, model.shard_groups(), compute, cfg.shard)
    rates = dataclasses.replace(cfg, scalar_lr=cfg.scalar_lr * schedule.scalar_scale(batch.tokens_per_step))
    optimizers = Optimizers(model, model.parameter_roles(), shape.n_embd, rates,
                            cfg.init_lr_frac * schedule.rate_scale(batch.tokens_per_step), compute.dtype)  # fmt: skip
    resumed = resume_stage(folder, model, optimizers, wanted, compute, rows.key, cfg.resume, cfg.other_code)
    step, meter = resumed.step, loop.Meter.start(steps, batch.tokens_per_step, flops, compute, resumed.state)
    scale, spikes = loop.LossScale.start(compute, resumed.state), loop.Spikes.start(resumed.state)
    batch = probe.fit(batch, model, optimizers, T, compute)
    fast = compiling.compiled(model, cfg.compile, (batch.device_batch_size, T), compute, model.compile_groups())
    stage = loop.Stage("mid", folder, cfg, meter, step, compute, resumed.state)
    batches = dataloader.steps(rows, step * batch.rows_per_step, batch.rows_per_step, batch.device_batch_size, compute)

    def finish(line: dict[str, Any]) -> None:
        """Validate where that is due, and log a step."""
        if loop.due(line["step"], cfg.eval_every, line["step"] == steps):
            val = dataloader.one_pass(val_rows, 20 * batch.tokens_per_step, batch.device_batch_size, compute)
            line["val_bpb"] = loss_eval.bits_per_byte(model, val, tokenizer.token_bytes(), compute)
            log(f"step {line['step']:05d} | validation: {line['val_bpb']:.4f} bits per byte")
        stage.tracker.log(**line)

    def save(line: dict[str, Any]) -> float:
        """Save the step of a line; returns what that took."""
        state = {**loop.state(meter, scale, line, spikes), "row": line["step"] * batch.rows_per_step, "data": rows.key}
        meta = make_meta("mid", shape, wanted, steps, state)
        return save_checkpoint(folder, line["step"], model, optimizers, tokenizer, meta, compute, cfg.keep)

    stage.ready(step, finish)
    while step < stage.stop:
        stage.start()
        lrm = schedule.trapezoid(step, steps, 0, cfg.warmdown_ratio, 0.0)
        optimizers.schedule(lrm, schedule.momentum(step, steps, cfg.warmdown_ratio), 1.0)
        outcome = loop.update(fast, optimizers, next(batches), scale, compute, spikes)
        step += 1
        line = stage.tick(step, outcome, lrm)
        stage.conclude(line, save, finish)
    stage.close()
    if stage.complete(step) and compute.main:
        report.training_section("mid", parent.tag, folder, wanted, device.summary(compute, counts["total"]))
    loop.log_end(folder, step, steps)


if __name__ == "__main__":
    run(watch.guarded(train), Config, __doc__)
