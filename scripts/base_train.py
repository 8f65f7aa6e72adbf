"""Pretraining: trains a GPT or a Qwen3 on the documents of a corpus, from random weights.

python -m scripts.base_train --depth=4
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --total_batch_size=262144
"""

from dataclasses import dataclass

from nanochat import dataloader, schedule
from nanochat.checkpoint_manager.families import on_meta
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.checkpoint_manager.resume import begun_settings
from nanochat.common import log
from nanochat.data.corpora import dropped_summary
from nanochat.data.mixing import resolve_data
from nanochat.device import Compute
from nanochat.optim import Rates
from nanochat.run import Plan, Run, RunFolder, launch, open_folder
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from nanochat.train import sizes, task_scores
from nanochat.train.fit import probe
from nanochat.train.flags import (
    BatchFlags,
    CoreFlags,
    Free,
    Rare,
    RunFlags,
    ScheduleFlags,
    ShapeFlags,
    check_ranges,
)
from nanochat.train.setup import set_matmul, set_up
from nanochat.train.validation import Validation, validation_line
from tasks.needs import warn_of_missing

DECAY_FACT = "short runs decay less"  # a setting of the runs that know short runs


@dataclass(frozen=True)
class Config:
    """Flags of pretraining."""

    shape: ShapeFlags = ShapeFlags()
    """the shape of the model"""
    schedule: ScheduleFlags = ScheduleFlags()
    """the length of the run, and its learning rate"""
    batch: BatchFlags = BatchFlags()
    """how a step is split"""
    data: Free[str | None] = None
    """corpus by name, the folder it was imported from, or a mixture such as web:0.7,books:0.3.
    default: the only corpus there is"""
    model_tag: Free[str | None] = None
    """name of the model, and of its folder of checkpoints; default: d and the depth, such as d4"""
    eval_every: Free[int] = 250
    """steps between validations; 0: never validate"""
    eval_tokens: Free[Rare[int | None]] = None
    """tokens per validation; default: 20 steps' worth, at most the whole validation shard"""
    samples: Free[Rare[int]] = 4
    """replies to held-out prompts to keep at each measurement, as the page /runs shows them; 0: none"""
    rates: Rare[Rates] = Rates()
    """learning rates of the parameters' roles"""
    core: CoreFlags = CoreFlags()
    """measurements on tasks, of the model as it trains"""
    run: RunFlags = RunFlags()
    """how the run is computed, saved and resumed"""

    def __post_init__(self) -> None:
        check_ranges(self)


def train(cfg: Config, compute: Compute) -> None:
    """Pretrain a model, resuming from any checkpoint that --resume selects."""
    corpus = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(corpus.vocabulary))
    tag = f"d{cfg.shape.depth}" if cfg.model_tag is None else cfg.model_tag
    facts = {"corpus": corpus.name, "tokenizer": tokenizer.hash[:16]}
    folder = open_run(tag, facts, cfg, compute)

    # The model's shape, how a step is split, and how long the run is
    shape = sizes.model_config(
        cfg.shape, tokenizer.vocab_size, corpus.name, compute, folder.begun_shape
    )
    sizes.advise(cfg.shape.family, tokenizer.pattern)
    size = sizes.model_size(shape, compute, cfg.shape.matmul)
    sizes.check_fits(shape.n_layer, size.parameters, cfg.run.shard, compute)
    tokens = cfg.schedule.tokens(size.flops_per_token, size.scaling_parameters)
    batch = sizes.batch(
        cfg.batch, shape, size.parameters, corpus.name, compute, tokens, folder.begun_rows
    )
    steps = cfg.schedule.steps(size.flops_per_token, size.scaling_parameters, batch.tokens_per_step)

    # Documents are tokenised once; a row is a pure function of (seed, row index)
    rows = dataloader.split_rows(corpus, tokenizer, "train", shape.sequence_len, cfg.run.seed)
    val_rows = dataloader.split_rows(corpus, tokenizer, "val", shape.sequence_len)
    rows_read = steps * batch.rows_per_step
    sizes.tell_epochs(corpus.name, rows.count, shape.sequence_len, steps, batch.rows_per_step)
    mixture = sizes.mixture_table(corpus, rows, rows_read)
    sizes.tell_mixture(mixture)
    data_figures = {"rows": mixture} if mixture else {}
    data_figures |= dropped_summary(corpus.corpora)
    shape = sizes.keep_bigrams(shape, cfg.shape.bigram_rows, rows_read / rows.count)
    warn_of_missing(corpus.name)

    # fp32 masters, sharded over the ranks; AdamW for tables and scalars, Muon for matrices
    model = on_meta(shape, compute)
    set_matmul(model, cfg.shape.matmul, compute)
    model.to_empty(device=compute.device)
    model.init_weights(cfg.run.seed)
    is_short = DECAY_FACT in folder.settings.values and schedule.is_short(
        steps * batch.tokens_per_step, size.scaling_parameters
    )
    optimizers = set_up(
        model,
        cfg.rates.for_run(
            batch.tokens_per_step, steps, cfg.schedule.target_param_data_ratio, is_short
        ),
        schedule.rate_scale(batch.tokens_per_step),
        folder.path,
        cfg.run,
        compute,
        schedule.table_momentum(steps),
    )
    val_tokens = cfg.eval_tokens or 20 * batch.tokens_per_step
    validation = Validation(val_rows, val_tokens, model, tokenizer, cfg.samples, compute)
    training = task_scores.TrainingRun(corpus.name, steps, steps * batch.tokens_per_step)
    scores = task_scores.of_base_model(cfg.core, training, model, tokenizer, compute)
    plan = Plan(steps, batch.tokens_per_step, batch.rows_per_step, rows.key)
    warmup = schedule.warmup_steps(cfg.schedule.warmup_steps, steps)

    with Run(folder, plan, model, tokenizer, optimizers, cfg.run, compute, data_figures) as run:
        batch = probe.fit(batch, model, optimizers, shape.sequence_len, compute)
        fast = run.prepare(rows, batch)
        batches = run.batches(rows, batch)
        for step in run.steps():
            with run.between_steps(cfg.eval_every) as due:
                if due:
                    val_bpb = validation.bits_per_byte(batch.device_batch_size)
                    run.record(val_bpb=val_bpb)
                    log(validation_line(step, val_bpb))
                    validation.keep_replies(folder.path, step)
                if run.must_measure(scores.every):
                    run.record(**scores.measure(step))
            if run.ended:
                break

            lrm = schedule.trapezoid(
                step, steps, warmup, cfg.schedule.warmdown_ratio, cfg.schedule.final_lr_frac
            )
            momentum = schedule.momentum(step, steps, cfg.schedule.warmdown_ratio)
            optimizers.schedule(lrm, momentum, schedule.decay_factor(step, steps))
            data = next(batches)
            with run.update(data.num_targets) as update:
                for idx, targets in update.passes(data.micro_batches):
                    loss = fast(idx, targets, reduction="sum")
                    update.add(loss)
                    (loss * update.factor).backward()
                outcome = update.step()
            run.finish(outcome, lrm)


def open_run(tag: str, facts: dict[str, str], cfg: Config, compute: Compute) -> RunFolder:
    """Return the folder of the run, after checking that it can be used; see open_folder().

    A run that was begun without the rule for the weight decay of short runs goes on without it.
    """
    begun = begun_settings(checkpoint_dir("base", tag), cfg.run.resume, compute)
    if not begun or DECAY_FACT in begun:
        facts = {**facts, DECAY_FACT: "yes"}
    return open_folder("base", tag, cfg, cfg.run, compute, **facts)


if __name__ == "__main__":
    launch(train, Config, __doc__)
