"""Supervised fine-tuning: only what the assistant says is trained; rows hold several whole conversations.

python -m scripts.chat_sft
torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from nanochat import dataloader, device, report
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent, make_meta
from nanochat.checkpoint_manager.resume import finished, resume_stage
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.common import UserError, log, run, settings
from nanochat.device import Compute
from nanochat.evals import loss as loss_eval
from nanochat.runtime import fingerprint, parallel, watch
from nanochat.train import compile as compiling
from nanochat.train import loop, probe, schedule, sizes
from nanochat.train.optim import Optimizers, Rates
from tasks.mixtures import mix


@dataclass(frozen=True)
class Config(loop.StageFlags, Rates):
    """Flags of fine-tuning."""

    source: Literal["mid", "base"] = "mid"
    """stage to start from"""
    source_step: int | None = None
    """step of the checkpoint to start from; default the newest"""
    conversations: str | None = None
    """a JSONL file of one's own conversations, instead of the mixture"""
    num_epochs: float = 1.0
    """passes over the mixture"""
    num_iterations: int | None = None
    """steps; takes precedence over num_epochs"""
    target_examples_per_step: int = 32
    """rows of a step, over all devices; a row holds several whole conversations"""
    device_batch_size: int | Literal["auto"] = 4
    """rows of a pass on one device, at most"""
    init_lr_frac: float = 0.02
    """factor on all learning rates, which then fall linearly to 0"""
    weight_decay: float = 0.0
    """Muon's decay"""
    eval_every: int = 100
    """steps between validations; 0 = never"""


def train(cfg: Config, compute: Compute) -> None:
    """Fine-tune over the mixture, going on from the newest checkpoint if there is one."""
    loop.begin(cfg, compute)
    parent = find_parent(cfg.source, cfg.model_tag, cfg.source_step)
    folder = checkpoint_dir("sft", parent.tag)
    corpus = cfg.data or parent.corpus
    wanted = {**settings(cfg), "parent": parent.identity, "corpus": corpus}
    fingerprint.check_start(wanted, compute)
    if finished(folder, wanted, compute, report.has_training_section("sft", parent.tag), cfg.resume):
        return
    if cfg.target_examples_per_step % compute.world_size:
        raise UserError(
            f"target_examples_per_step must be a multiple of the {compute.world_size} ranks, got "
            f"{cfg.target_examples_per_step}", 2
        )  # fmt: skip
    loaded = load_model(cfg.source, parent.tag, parent.step, compute, dtype=device.MASTER)
    model, tokenizer, shape = loaded.model, loaded.tokenizer, loaded.model.config
    counts, flops, T = model.parameter_counts(), model.flops_per_token(), shape.sequence_len

    tokens = cfg.target_examples_per_step * T
    batch = sizes.batch(tokens, cfg.device_batch_size, shape, counts["total"], None, corpus, compute)
    mixture = mix("sft", corpus, cfg.seed, cfg.conversations)
    rows = dataloader.conversation_rows("sft", mixture.train, mixture.key, tokenizer, T, cfg.seed, masked=True)
    val_rows = dataloader.conversation_rows("sft-val", mixture.val, mixture.key, tokenizer, T, cfg.seed, masked=True)
    steps = cfg.num_iterations or max(int(cfg.num_epochs * rows.count) // batch.rows_per_step, 1)
    log(f"mixture: {mixture.name}, {rows.count:,} rows of {T} tokens; {steps:,} steps")

    parallel.shard(model, model.shard_groups(), compute, cfg.shard)
    rates = dataclasses.replace(cfg, scalar_lr=cfg.scalar_lr * schedule.scalar_scale(batch.tokens_per_step))
    optimizers = Optimizers(model, model.parameter_roles(), shape.n_embd, rates, cfg.init_lr_frac, compute.dtype)
    resumed = resume_stage(folder, model, optimizers, wanted, compute, rows.key, cfg.resume, cfg.other_code)
    step, meter = resumed.step, loop.Meter.start(steps, batch.tokens_per_step, flops, compute, resumed.state)
    scale, spikes = loop.LossScale.start(compute, resumed.state), loop.Spikes.start(resumed.state)
    batch = probe.fit(batch, model, optimizers, T, compute)
    fast = compiling.compiled(model, cfg.compile, (batch.device_batch_size, T), compute, model.compile_groups())
    stage = loop.Stage("sft", folder, cfg, meter, step, compute, resumed.state)
    batches = dataloader.steps(rows, step * batch.rows_per_step, batch.rows_per_step, batch.device_batch_size, compute)

    def finish(line: dict[str, Any]) -> None:
        """Validate where that is due, and log a step."""
        if loop.due(line["step"], cfg.eval_every, line["step"] == steps):
            val = dataloader.one_pass(val_rows, 20 * batch.tokens_per_step, batch.device_batch_size, compute)
            line["val_bpb"] = loss_eval.bits_per_byte(model, val, tokenizer.token_bytes(), compute)
            log(f"step {line['step']:05d} | validation: {line['val_bpb']:.4f} bits per byte of the answers")
        stage.tracker.log(**line)

    def save(line: dict[str, Any]) -> float:
        """Save the step of a line; returns what that took."""
        state = {**loop.state(meter, scale, line, spikes), "row": line["step"] * batch.rows_per_step, "data": rows.key}
        meta = make_meta("sft", shape, wanted, steps, state)
        return save_checkpoint(folder, line["step"], model, optimizers, tokenizer, meta, compute, cfg.keep)

    stage.ready(step, finish)
    while step < stage.stop:
        stage.start()
        lrm = 1 - step / steps
        optimizers.schedule(lrm, 0.95, 1.0)
        outcome = loop.update(fast, optimizers, next(batches), scale, compute, spikes)
        step += 1
        line = stage.tick(step, outcome, lrm)
        stage.conclude(line, save, finish)
    stage.close()
    if stage.complete(step) and compute.main:
        report.training_section("sft", parent.tag, folder, wanted, device.summary(compute, counts["total"]))
    loop.log_end(folder, step, steps)


if __name__ == "__main__":
    run(watch.guarded(train), Config, __doc__)
