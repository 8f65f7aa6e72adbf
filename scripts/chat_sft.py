"""Supervised fine-tuning: of conversations only what the assistant says is trained. A row holds several of them.

python -m scripts.chat_sft
torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
"""

from dataclasses import dataclass
from typing import Literal

from nanochat.data.mixing import resolve_data
from nanochat.data.traits import traits
from nanochat.dataloader import blend, chat_rows, split_rows
from nanochat.device import Compute
from nanochat.train import sizes
from nanochat.train.flags import Auto, ChatFlags, ExampleFlags, Free
from nanochat.train.stage import Stage, launch
from tasks.mixtures import mix


@dataclass(frozen=True)
class Config(ExampleFlags, ChatFlags):
    """Flags of fine-tuning."""

    source: Free[Literal["mid", "base"]] = "mid"
    """stage whose model to start from"""
    source_step: Free[int | None] = None
    """step of that stage's checkpoint; default: the newest"""
    documents_every: int | Auto = "auto"
    """take every n-th row from the base corpus, of which every token is trained, so that the model does not forget
    what no question asks; 0: none. auto: 8 for TinyWorld's conversations, else 0"""
    init_lr_frac: float = 0.02
    """factor on all learning rates, which then fall linearly to 0"""


def train(cfg: Config, compute: Compute) -> None:
    """Fine-tune over the mixture, resuming from the newest checkpoint if there is one."""
    stage = Stage.after(cfg.source, cfg.source_step, "sft", cfg, compute)
    model, tokenizer = stage.load_parent()
    T = model.config.sequence_len
    parameters = model.parameter_counts()["total"]
    batch = sizes.example_batch(cfg.target_examples_per_step, cfg.device_batch_size, model.config, parameters,
                                stage.corpus, compute)  # fmt: skip

    mixture = mix("sft", stage.corpus, cfg.seed, cfg.conversations, cfg.mix)
    answers, val_answers = chat_rows("sft", mixture, tokenizer, T, cfg.seed, masked=True)
    every = cfg.documents_every
    if every == "auto":
        every = traits(stage.corpus).answers_documents_every if cfg.conversations is None else 0
    if every:
        answers = blend(answers, split_rows(resolve_data(stage.corpus), tokenizer, "train", T, cfg.seed), every)
    beside = f" and one row in {every} of {stage.corpus}" if every else ""
    steps = stage.steps_over(answers, batch.rows_per_step, f"{mixture.name}{beside}")

    stage.set_up(model, tokenizer, cfg.for_batch(batch.tokens_per_step), cfg.init_lr_frac)
    for examples in stage.train_rows(answers, batch, steps, val_answers, cfg.eval_every, of_what=" of the answers"):
        lrm = 1 - stage.step / steps
        stage.schedule(lrm)
        stage.conclude(stage.update(examples))


if __name__ == "__main__":
    launch(train, Config, __doc__)
