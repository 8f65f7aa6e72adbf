"""Pretraining: a GPT from nothing, on the documents of a corpus.

python -m scripts.base_train --depth=4
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --total_batch_size=262144
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from nanochat import dataloader, device, report
from nanochat.checkpoint_manager.locate import checkpoint_dir, make_meta
from nanochat.checkpoint_manager.resume import finished, resume_stage
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.common import log, run, settings
from nanochat.data import mixing
from nanochat.dataloader import split_rows
from nanochat.device import Compute
from nanochat.evals import loss as loss_eval
from nanochat.gpt import GPT
from nanochat.runtime import fingerprint, parallel, watch
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from nanochat.train import compile as compiling
from nanochat.train import loop, probe, schedule, sizes
from nanochat.train.optim import Optimizers, Rates, for_run

Auto = Literal["auto"]


@dataclass(frozen=True)
class Config(loop.StageFlags, Rates):
    """Flags of pretraining; `auto` is decided by corpus, device and memory, and printed."""

    data: str | None = None
    """corpus by name, the folder it was made from, or a mixture: web:0.7,books:0.3 takes seven rows in ten of web;
    default: the only one prepared"""
    depth: int = 20
    """layers, the one dial of size: what is not given follows from it"""
    model_dim: int | Auto = "auto"
    """channels; auto: 64 x depth, rounded up to whole heads"""
    head_dim: int | Auto = "auto"
    """channels of a head; auto: 128, below eight layers 64"""
    max_seq_len: int | Auto = "auto"
    """tokens of a row, the context; auto: 2,048, on a CPU 512, for TinyWorld 256"""
    window_pattern: str = "SSSL"
    """tiled over layers: L sees the whole row, S a quarter of it"""
    num_iterations: int | None = None
    """steps; takes precedence over target_flops and target_param_data_ratio"""
    target_flops: float | None = None
    """train for this many FLOPs"""
    target_param_data_ratio: float = 12.0
    """train for this many tokens per parameter of the matrices and the head"""
    total_batch_size: int | Auto = "auto"
    """tokens of a step, over all devices; auto: by the length of the run, for TinyWorld 8,192"""
    device_batch_size: int | Auto = "auto"
    """rows of a pass on one device, at most; auto: what its memory holds"""
    gradient_accumulation_steps: int | None = None
    """passes of a step; follows from total_batch_size and device_batch_size, and must agree with them if given"""
    warmup_steps: int | None = None
    """steps of linear warmup; default 40, in short runs a twentieth"""
    warmdown_ratio: float = 0.65
    """the last part of the run, in which the learning rate falls"""
    final_lr_frac: float = 0.05
    """the learning rate at the end, as a part of its peak"""
    eval_every: int = 250
    """steps between validations; 0 = never"""
    eval_tokens: int | None = None
    """tokens of a validation; default: all of them, at most 20 steps' worth"""


def train(cfg: Config, compute: Compute) -> None:
    """Train to the horizon, going on from the newest checkpoint if there is one."""
    loop.begin(cfg, compute)
    tag = cfg.model_tag or f"d{cfg.depth}"
    folder = checkpoint_dir("base", tag)
    corpus = mixing.resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(corpus.vocabulary))
    wanted = {**settings(cfg), "corpus": corpus.name, "tokenizer": tokenizer.hash[:16]}
    fingerprint.check_start(wanted, compute)
    if finished(folder, wanted, compute, report.has_training_section("base", tag), cfg.resume):
        return

    # The model's shape, how a step is split, and how long the run is
    shape = sizes.model_config(cfg.depth, cfg.model_dim, cfg.head_dim, cfg.max_seq_len, cfg.window_pattern,
                               tokenizer.vocab_size, corpus.name, compute)  # fmt: skip
    with torch.device("meta"):  # without memory, until it is known to fit
        model = GPT(shape, dtype=compute.dtype, operations=compute.operations)
    counts, flops = model.parameter_counts(), model.flops_per_token()
    sizes.check_fits(shape.n_layer, counts["total"], cfg.shard, compute)
    horizon_tokens = cfg.target_param_data_ratio * counts["scaling"]
    batch = sizes.batch(cfg.total_batch_size, cfg.device_batch_size, shape, counts["total"], horizon_tokens,
                        corpus.name, compute, cfg.gradient_accumulation_steps)  # fmt: skip
    horizon = schedule.horizon(cfg.num_iterations, cfg.target_flops, cfg.target_param_data_ratio, flops,
                               counts["scaling"], batch.tokens_per_step)  # fmt: skip
    steps, warmup = horizon.steps, schedule.warmup_steps(cfg.warmup_steps, horizon.steps)
    log(f"model: {shape.n_layer} layers, {shape.n_embd} channels, vocabulary {shape.vocab_size:,}, "
        f"{counts['total']:,} parameters, {flops:,} FLOPs a token")  # fmt: skip
    log(f"horizon: {steps:,} steps, {steps * batch.tokens_per_step:,} tokens ({horizon.reason})")

    # Tokenised once; a row is a pure function of (seed, row number)
    T = shape.sequence_len
    rows = split_rows(corpus, tokenizer, "train", T, cfg.seed)
    val_rows = split_rows(corpus, tokenizer, "val", T)
    val_tokens = cfg.eval_tokens or 20 * batch.tokens_per_step
    read = steps * batch.rows_per_step
    mixed = dataloader.mixture_table(corpus, rows, read)
    log(f"data: {corpus.name}, {rows.count:,} rows of {T} tokens, {read / rows.count:.2f} epochs")
    for part in mixed.get("rows", []):
        log(f"  {part['corpus']}: {part['share']} of the rows, {part['rows read']:,}, {part['epochs']:.2f} epochs")

    # fp32 masters, sharded over the ranks; AdamW for tables and scalars, Muon for matrices
    model.to_empty(device=compute.device)
    model.init_weights(cfg.seed)
    parallel.shard(model, model.shard_groups(), compute, cfg.shard)
    rates = for_run(cfg, batch.tokens_per_step, steps, cfg.target_param_data_ratio)
    optimizers = Optimizers(model, model.parameter_roles(), shape.n_embd, rates,
                            schedule.rate_scale(batch.tokens_per_step), compute.dtype,
                            schedule.table_momentum(steps))  # fmt: skip

    # Go on where a run was stopped
    resumed = resume_stage(folder, model, optimizers, wanted, compute, rows.key, cfg.resume, cfg.other_code)
    step, meter = resumed.step, loop.Meter.start(steps, batch.tokens_per_step, flops, compute, resumed.state)
    scale, spikes = loop.LossScale.start(compute, resumed.state), loop.Spikes.start(resumed.state)
    batch = probe.fit(batch, model, optimizers, T, compute)
    fast = compiling.compiled(model, cfg.compile, (batch.device_batch_size, T), compute, model.compile_groups())
    stage = loop.Stage("base", folder, cfg, meter, step, compute, resumed.state)
    batches = dataloader.steps(rows, step * batch.rows_per_step, batch.rows_per_step, batch.device_batch_size, compute)

    def finish(line: dict[str, Any]) -> None:
        """Validate where that is due, and log a step."""
        if loop.due(line["step"], cfg.eval_every, line["step"] == steps):
            val = dataloader.one_pass(val_rows, val_tokens, batch.device_batch_size, compute)
            line["val_bpb"] = loss_eval.bits_per_byte(model, val, tokenizer.token_bytes(), compute)
            log(f"step {line['step']:05d} | validation: {line['val_bpb']:.4f} bits per byte")
        stage.tracker.log(**line)

    def save(line: dict[str, Any]) -> float:
        """Save the step of a line; returns what that took."""
        state = {**loop.state(meter, scale, line, spikes), "row": line["step"] * batch.rows_per_step, "data": rows.key}
        meta = make_meta("base", shape, wanted, steps, state)
        return save_checkpoint(folder, line["step"], model, optimizers, tokenizer, meta, compute, cfg.keep)

    stage.ready(step, finish)
    while step < stage.stop:
        stage.start()
        lrm = schedule.trapezoid(step, steps, warmup, cfg.warmdown_ratio, cfg.final_lr_frac)
        optimizers.schedule(lrm, schedule.momentum(step, steps, cfg.warmdown_ratio), schedule.decay_factor(step, steps))
        outcome = loop.update(fast, optimizers, next(batches), scale, compute, spikes)
        step += 1
        line = stage.tick(step, outcome, lrm)
        stage.conclude(line, save, finish)
    stage.close()
    if stage.complete(step) and compute.main:
        where = {**device.summary(compute, counts["total"]), **mixed}
        report.training_section("base", tag, folder, wanted, where)
    loop.log_end(folder, step, steps)


if __name__ == "__main__":
    run(watch.guarded(train), Config, __doc__)
