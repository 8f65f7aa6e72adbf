"""Supervised fine-tuning: trains the answers of conversations, several of which share a row.

python -m scripts.chat_sft
torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch.nn as nn

from nanochat.common import log
from nanochat.data.traits import traits
from nanochat.device import Compute
from nanochat.optim import Rates
from nanochat.run import Plan, Run, launch, load_parent, open_folder, parent_of
from nanochat.train import sizes, task_scores
from nanochat.train.chat_rows import chat_rows
from nanochat.train.fit import probe
from nanochat.train.flags import (
    ChatFlags,
    CoreFlags,
    Epochs,
    ExampleFlags,
    Free,
    Rare,
    RunFlags,
    StageFlags,
    check_ranges,
)
from nanochat.train.setup import set_up
from nanochat.train.start_weights import StartWeights
from nanochat.train.validation import Validation, validation_line
from tasks.mixtures import curriculum, mix, own_content


@dataclass(frozen=True)
class Config:
    """Flags of fine-tuning."""

    source: Free[Literal["mid", "base"]] = "mid"
    """stage whose model to start from"""
    source_step: Free[Rare[int | None]] = None
    """step of that stage's checkpoint; default: the newest"""
    init_lr_frac: float = 0.02
    """factor on all learning rates, which then fall linearly to 0"""
    start_share: float = 0.0
    """share that the start's weights have in the finished model; 0.5: the mean of start and end.
    Such a model answers more questions in new wordings, and learns less of what is new"""
    eval_every: Free[int] = 100
    """steps between validations; 0: never validate"""
    stage: StageFlags = StageFlags()
    """the model to train, and the name of the result"""
    epochs: Epochs = Epochs()
    """how long the run is"""
    chats: ChatFlags = ChatFlags()
    """the conversations to learn from"""
    batch: ExampleFlags = ExampleFlags()
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
    """Fine-tune a model on conversations, resuming from any checkpoint that --resume selects."""
    parent, tag = parent_of(cfg.source, cfg.source_step, "sft", cfg.stage, cfg.chats.own_file)
    corpus = cfg.stage.corpus(parent.corpus)
    facts = {"parent": parent.identity, "corpus": corpus, **own_content(cfg.chats.own_file)}
    folder = open_folder("sft", tag, cfg, cfg.run, compute, **facts)
    model, tokenizer = load_parent(parent, compute, cfg.stage.matmul)
    mixture = mix(
        "sft",
        corpus,
        cfg.run.seed,
        cfg.chats.conversations,
        cfg.chats.mix,
        cfg.chats.skip_bad_lines,
    )
    length = model.config.sequence_len
    rows, val_rows = chat_rows("sft", mixture, tokenizer, length, cfg.run.seed, masked=True)
    batch = sizes.example_batch(
        cfg.batch,
        model.config,
        model.parameter_counts()["total"],
        rows,
        corpus,
        compute,
        folder.begun_rows,
    )
    every = traits(corpus).answers_documents_every if cfg.chats.conversations is None else 0
    rows, documents = cfg.chats.with_documents(rows, corpus, every, tokenizer, cfg.run.seed)
    steps = cfg.epochs.steps_over(
        rows.count,
        length,
        batch.rows_per_step,
        f"{mixture.name}{documents}",
        cfg.batch.smaller_steps,
    )

    rates = cfg.rates.for_batch(batch.tokens_per_step)
    optimizers = set_up(model, rates, cfg.init_lr_frac, folder.path, cfg.run, compute)
    start = StartWeights(cast(nn.Module, model), cfg.start_share)  # before a checkpoint is loaded
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
                    log(validation_line(step, val_bpb, of_answers=True))
                    validation.keep_replies(folder.path, step)
                if run.must_measure(scores.every):
                    run.record(**scores.measure(step))
            if run.ended:
                break

            lrm = 1 - step / steps
            optimizers.schedule(lrm, momentum=0.95, decay=1.0)
            data = next(batches)
            with run.update(data.num_targets) as update:
                for idx, targets in update.passes(data.micro_batches):
                    loss = fast(idx, targets, reduction="sum")
                    update.add(loss)
                    (loss * update.factor).backward()
                outcome = update.step()
            if step == steps - 1:
                start.mix()
            run.finish(outcome, lrm)


if __name__ == "__main__":
    launch(train, Config, __doc__)
