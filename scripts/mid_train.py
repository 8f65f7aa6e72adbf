"""Midtraining: the base model learns the form of a chat, tools and tasks.

python -m scripts.mid_train
torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16
"""

from dataclasses import dataclass

from nanochat.data.traits import traits
from nanochat.dataloader import chat_rows
from nanochat.device import Compute
from nanochat.train import schedule, sizes
from nanochat.train.flags import BatchFlags, ChatFlags, Free
from nanochat.train.stage import Stage, launch
from tasks.mixtures import mix
from tasks.needs import warn_of_missing


@dataclass(frozen=True)
class Config(ChatFlags, BatchFlags):
    """Flags of midtraining. The model is the one that base_train has trained."""

    base_step: Free[int | None] = None
    """step of the base checkpoint to start from; default: the newest"""
    init_lr_frac: float = 1.0
    """factor on all learning rates"""
    answers_only: bool = False
    """train the answers of conversations alone, as fine-tuning does, and documents whole; default: every token.
    On a CPU such a step of a small model takes a fifth less time"""
    warmdown_ratio: float = 0.2
    """fraction of the run, at its end, over which the learning rate falls to 0"""
    eval_every: Free[int] = 150
    """steps between validations; 0: never validate"""


def train(cfg: Config, compute: Compute) -> None:
    """Train over the mixture, resuming from the newest checkpoint if there is one."""
    stage = Stage.after("base", cfg.base_step, "mid", cfg, compute)
    model, tokenizer = stage.load_parent()
    length, corpus = model.config.sequence_len, stage.corpus
    batch = sizes.batch(
        cfg.total_batch_size,
        cfg.device_batch_size,
        model.config,
        model.parameter_counts()["total"],
        None,
        corpus,
        compute,
        cfg.gradient_accumulation_steps,
        stage.begun_rows,
    )

    mixture = mix("mid", corpus, cfg.seed, cfg.conversations, cfg.mix)
    rows, val_rows = chat_rows("mid", mixture, tokenizer, length, cfg.seed, masked=cfg.answers_only)
    rows, beside = cfg.with_documents(rows, corpus, traits(corpus).documents_every, tokenizer)
    steps = stage.steps_over(rows, batch.rows_per_step, f"{mixture.name}{beside}")

    per_step = batch.tokens_per_step
    warn_of_missing(corpus)
    stage.set_up(
        model, tokenizer, cfg.for_batch(per_step), cfg.init_lr_frac * schedule.rate_scale(per_step)
    )
    of_what = " of the answers" if cfg.answers_only else ""
    for step in stage.train_rows(rows, batch, steps, val_rows, cfg.eval_every, of_what=of_what):
        lrm = schedule.trapezoid(stage.step, steps, 0, cfg.warmdown_ratio, 0.0)
        stage.schedule(lrm, schedule.momentum(stage.step, steps, cfg.warmdown_ratio))
        stage.conclude(stage.update(step))


if __name__ == "__main__":
    launch(train, Config, __doc__)
