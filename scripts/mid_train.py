"""Midtraining: the base model learns the form of a chat, the use of tools, and tasks.

python -m scripts.mid_train
torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16
"""

from dataclasses import dataclass

from nanochat import schedule
from nanochat.common import log
from nanochat.data.traits import traits
from nanochat.device import Compute
from nanochat.optim import Rates
from nanochat.run import Plan, Run, launch, load_parent, open_folder, parent_of
from nanochat.train import sizes, task_scores
from nanochat.train.chat_rows import chat_rows
from nanochat.train.fit import probe
from nanochat.train.flags import (
    BatchFlags,
    ChatFlags,
    CoreFlags,
    Epochs,
    Free,
    Rare,
    RunFlags,
    StageFlags,
    check_ranges,
)
from nanochat.train.setup import set_up
from nanochat.train.validation import Validation, validation_line
from tasks.mixtures import curriculum, mix, own_content
from tasks.needs import warn_of_missing


@dataclass(frozen=True)
class Config:
    """Flags of midtraining, which starts from a model that base_train has trained."""

    base_step: Free[Rare[int | None]] = None
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
    stage: StageFlags = StageFlags()
    """the model to train, and the name of the result"""
    epochs: Epochs = Epochs()
    """how long the run is"""
    chats: ChatFlags = ChatFlags()
    """the conversations to learn from"""
    batch: BatchFlags = BatchFlags()
    """how a step is split"""
    rates: Rare[Rates] = Rates(weight_decay=0.0)
    """learning rates of the parameters' roles"""
    core: CoreFlags = CoreFlags()
    """measurements on tasks, of the model as it trains"""
    run: RunFlags = RunFlags()
    """how the run is computed, saved and resumed"""

    def __post_init__(self) -> None:
        check_ranges(self)


def train(cfg: Config, compute: Compute) -> None:
    """Midtrain a base model, resuming from any checkpoint that --resume selects."""
    parent, tag = parent_of("base", cfg.base_step, "mid", cfg.stage, cfg.chats.own_file)
    corpus = cfg.stage.corpus(parent.corpus)
    facts = {"parent": parent.identity, "corpus": corpus, **own_content(cfg.chats.own_file)}
    folder = open_folder("mid", tag, cfg, cfg.run, compute, **facts)
    model, tokenizer = load_parent(parent, compute, cfg.stage.matmul)
    parameters = model.parameter_counts()["total"]
    batch = sizes.batch(
        cfg.batch, model.config, parameters, corpus, compute, begun_rows=folder.begun_rows
    )

    mixture = mix(
        "mid",
        corpus,
        cfg.run.seed,
        cfg.chats.conversations,
        cfg.chats.mix,
        cfg.chats.skip_bad_lines,
    )
    length = model.config.sequence_len
    rows, val_rows = chat_rows(
        "mid", mixture, tokenizer, length, cfg.run.seed, masked=cfg.answers_only
    )
    rows, documents = cfg.chats.with_documents(
        rows, corpus, traits(corpus).documents_every, tokenizer, cfg.run.seed
    )
    steps = cfg.epochs.steps_over(
        rows.count,
        length,
        batch.rows_per_step,
        f"{mixture.name}{documents}",
        cfg.batch.smaller_steps,
    )
    warn_of_missing(corpus)

    rates = cfg.rates.for_batch(batch.tokens_per_step)
    scale = cfg.init_lr_frac * schedule.rate_scale(batch.tokens_per_step)
    optimizers = set_up(model, rates, scale, folder.path, cfg.run, compute)
    val_tokens = 20 * batch.tokens_per_step
    validation = Validation(val_rows, val_tokens, model, tokenizer, cfg.stage.samples, compute)
    measures = curriculum(corpus).measures(False)
    own_data = cfg.chats.conversations is not None
    training = task_scores.TrainingRun(corpus, steps, steps * batch.tokens_per_step, own_data)
    scores = task_scores.of_chat_model(cfg.core, training, measures, model, tokenizer, compute)
    plan = Plan(steps, batch.tokens_per_step, batch.rows_per_step, rows.key)

    with Run(folder, plan, model, tokenizer, optimizers, cfg.run, compute) as run:
        batch = probe.fit(batch, model, optimizers, length, compute)
        fast = run.prepare(rows, batch)
        batches = run.batches(rows, batch)
        for step in run.steps():
            with run.between_steps(cfg.eval_every) as due:
                if due:
                    val_bpb = validation.bits_per_byte(batch.device_batch_size)
                    run.record(val_bpb=val_bpb)
                    log(validation_line(step, val_bpb, of_answers=cfg.answers_only))
                    validation.keep_replies(folder.path, step)
                if run.must_measure(scores.every):
                    run.record(**scores.measure(step))
            if run.ended:
                break

            lrm = schedule.trapezoid(step, steps, 0, cfg.warmdown_ratio, 0.0)
            momentum = schedule.momentum(step, steps, cfg.warmdown_ratio)
            optimizers.schedule(lrm, momentum, decay=1.0)
            data = next(batches)
            with run.update(data.num_targets) as update:
                for idx, targets in update.passes(data.micro_batches):
                    loss = fast(idx, targets, reduction="sum")
                    update.add(loss)
                    (loss * update.factor).backward()
                outcome = update.step()
            run.finish(outcome, lrm)


if __name__ == "__main__":
    launch(train, Config, __doc__)
