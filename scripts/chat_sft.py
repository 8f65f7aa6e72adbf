"""Supervised fine-tuning: of conversations only what the assistant says is trained. A row holds several of them.

python -m scripts.chat_sft
torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
"""

from dataclasses import dataclass
from typing import Literal, cast

import torch.nn as nn

from nanochat import dataloader
from nanochat.data.traits import traits
from nanochat.device import Compute
from nanochat.train import sizes
from nanochat.train.flags import ChatFlags, ExampleFlags, Free
from nanochat.train.stage import Stage, launch
from nanochat.train.update import Start
from tasks.mixtures import mix


@dataclass(frozen=True)
class Config(ExampleFlags, ChatFlags):
    """Flags of fine-tuning."""

    source: Free[Literal["mid", "base"]] = "mid"
    """stage whose model to start from"""
    source_step: Free[int | None] = None
    """step of that stage's checkpoint; default: the newest"""
    init_lr_frac: float = 0.02
    """factor on all learning rates, which then fall linearly to 0"""
    start_share: float = 0.0
    """share that the start's weights have in the finished model; 0.5: the mean of start and end.
    Such a model answers more questions in new wordings, and learns less of what is new"""


def train(cfg: Config, compute: Compute) -> None:
    """Fine-tune over the mixture, resuming from the newest checkpoint if there is one."""
    stage = Stage.after(cfg.source, cfg.source_step, "sft", cfg, compute)
    model, tokenizer = stage.load_parent()
    T = model.config.sequence_len
    parameters = model.parameter_counts()["total"]
    mixture = mix("sft", stage.corpus, cfg.seed, cfg.conversations, cfg.mix)
    answers, val_answers = dataloader.chat_rows("sft", mixture, tokenizer, T, cfg.seed, masked=True)
    batch = sizes.example_batch(
        cfg.target_examples_per_step,
        cfg.device_batch_size,
        model.config,
        parameters,
        answers,
        stage.corpus,
        compute,
        stage.begun_rows,
    )
    documents = traits(stage.corpus).answers_documents_every if cfg.conversations is None else 0
    answers, beside = cfg.with_documents(answers, stage.corpus, documents, tokenizer)
    described = f"{mixture.name}{beside}"
    steps = stage.steps_over(answers, batch.rows_per_step, described)

    stage.set_up(model, tokenizer, cfg.for_batch(batch.tokens_per_step), cfg.init_lr_frac)
    start = Start(cast(nn.Module, model), cfg.start_share)
    for examples in stage.train_rows(
        answers, batch, steps, val_answers, cfg.eval_every, of_what=" of the answers"
    ):
        stage.schedule(lrm=1 - stage.step / steps)
        outcome = stage.update(examples)
        if stage.step == steps - 1:
            start.mix()
        stage.conclude(outcome)


if __name__ == "__main__":
    launch(train, Config, __doc__)
