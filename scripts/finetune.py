"""Fine-tune a published model (Qwen1.5 to Qwen3.5) on your own conversations: an adapter (LoRA), or every parameter.

python -m scripts.finetune --model ./Qwen3-0.6B --data chats.jsonl
torchrun --standalone --nproc_per_node=8 -m scripts.finetune -- --model ./Qwen2.5-7B --data chats.jsonl --shard=full
python -m scripts.chat_cli -i tune
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from nanochat.checkpoint_manager.huggingface.base import open_base
from nanochat.common import UserError, log
from nanochat.dataloader import chat_rows
from nanochat.device import Compute, seed_all
from nanochat.nn.lora import LoraConfig
from nanochat.prepare.plan import TooLong
from nanochat.train import schedule, sizes
from nanochat.train.flags import Auto, Epochs, ExampleFlags, Free, RunFlags
from nanochat.train.optim import OneRate
from nanochat.train.stage import Stage, launch
from tasks.mixtures import own_conversations


@dataclass(frozen=True, kw_only=True)
class Config(ExampleFlags, Epochs, RunFlags):
    """Flags of fine-tuning a published model."""

    model: Free[Path]
    """folder of the model: config.json, tokenizer.json and safetensors files"""
    data: Free[tuple[str, ...]]
    """JSONL or JSON files of conversations: messages, ShareGPT or Alpaca.
    FILE:2 takes the conversations of a file twice, FILE:0.5 every second one"""
    lora_rank: int = 8
    """rank of the adapter; 0: no adapter, every parameter is trained"""
    lora_alpha: float = 16.0
    """what the adapter adds is multiplied by alpha / rank"""
    lora_dropout: float = 0.0
    """share of a matrix's inputs that the adapter does not see in training"""
    lora_targets: tuple[str, ...] = LoraConfig.targets
    """matrices that get an adapter"""
    rslora: bool = False
    """multiply by alpha / sqrt(rank) instead, which keeps high ranks learning"""
    learning_rate: float | Auto = "auto"
    """learning rate of AdamW; auto: 1e-4 for an adapter, 1e-5 for every parameter"""
    weight_decay: float = 0.0
    """decay of matrices and adapters"""
    warmup_ratio: float = 0.03
    """share of the run over which the learning rate rises; then it falls to 0 as a cosine"""
    max_length: int = 2048
    """tokens of a row, and of the longest conversation; a row holds several conversations that cannot see each other"""
    too_long: TooLong = "cut"
    """conversations longer than a row: cut keeps their beginning, drop leaves them out"""
    checkpoint_activations: Free[bool] = False
    """keep only the inputs of layers for the backward pass and compute each layer again: less memory, a third slower"""
    out_tag: Annotated[Free[str | None], arg(aliases=["--out"])] = None
    """name of the result; default: the names of the model and of the first file"""

    def __post_init__(self) -> None:
        if not self.data:
            raise UserError("--data needs at least one file of conversations, got none: name one, such as a.jsonl", 2)

    @property
    def lora(self) -> LoraConfig | None:
        """The shape of the adapter, or None to train every parameter."""
        if self.lora_rank == 0:
            return None
        return LoraConfig(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets, self.rslora)

    @property
    def tag(self) -> str:
        """The name of the result."""
        first = Path(self.data[0].rpartition(":")[0] or self.data[0]).stem
        return self.out_tag or f"{self.model.expanduser().resolve().name}-{first}"


def train(cfg: Config, compute: Compute) -> None:
    """Fine-tune, resuming from the newest checkpoint if there is one."""
    lora, T = cfg.lora, cfg.max_length
    base = open_base(cfg.model, T, lora, compute, cfg.seed)
    base.model.checkpoints = cfg.checkpoint_activations
    conversations = own_conversations(cfg.data)
    stage = Stage("tune", cfg, compute, cfg.tag, parent=base.identity, corpus=conversations.name,
                  content=conversations.key)  # fmt: skip
    stage.about = base.about
    log(f"tune: {'an adapter of rank ' + str(lora.rank) if lora else 'every parameter'} of {base.folder.name}; "
        f"checkpoints go to {stage.folder}")  # fmt: skip

    name = f"tune-{conversations.key[-12:]}"
    answers, val_answers = chat_rows(name, conversations, base.tokenizer, T, cfg.seed, True, cfg.too_long)
    batch = sizes.example_batch(cfg.target_examples_per_step, cfg.device_batch_size, base.model.config, base.held,
                                conversations.name, compute)  # fmt: skip
    rate = (1e-4 if lora else 1e-5) if cfg.learning_rate == "auto" else cfg.learning_rate
    steps = stage.steps_over(answers, batch.rows_per_step, conversations.name)
    stage.set_up(base.model, base.tokenizer, OneRate(rate, cfg.weight_decay), 1.0, fill=base.fill)
    for examples in stage.train_rows(answers, batch, steps, val_answers, cfg.eval_every, of_what=" of the answers"):
        seed_all((cfg.seed * 1_000_003 + stage.step) * 65_537 + compute.rank)  # dropout: the same after a resume
        stage.schedule(schedule.cosine(stage.step, steps, cfg.warmup_ratio))
        stage.conclude(stage.update(examples))


if __name__ == "__main__":
    launch(train, Config, __doc__)
