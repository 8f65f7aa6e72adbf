"""Fine-tune a published model (Qwen1.5 to Qwen3.5) on your own conversations or preferences: an adapter, or all of it.

python -m scripts.finetune --model ./Qwen3-0.6B --data chats.jsonl
python -m scripts.finetune --model ./Qwen3-0.6B --data preferences.jsonl --loss=dpo
torchrun --standalone --nproc_per_node=8 -m scripts.finetune -- --model ./Qwen2.5-7B --data chats.jsonl --shard=full
python -m scripts.chat_cli -i tune
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from nanochat.checkpoint_manager.huggingface.base import open_base
from nanochat.common import UserError, log
from nanochat.dataloader import chat_rows
from nanochat.device import Compute, seed_all
from nanochat.evals.preferences import PreferenceLoss, add_references
from nanochat.nn.lora import LoraConfig
from nanochat.planner.forecast import Tuning
from nanochat.planner.tuning import check_fits
from nanochat.prepare.plan import TooLong
from nanochat.train import schedule, sizes
from nanochat.train.flags import Auto, Epochs, ExampleFlags, Free, RunFlags
from nanochat.train.optim import OneRate
from nanochat.train.stage import Stage, launch
from tasks.mixtures import own_conversations, own_pairs


@dataclass(frozen=True, kw_only=True)
class Config(ExampleFlags, Epochs, RunFlags):
    """Flags of fine-tuning a published model."""

    model: Free[Path]
    """folder of the model: config.json, tokenizer.json and safetensors files"""
    data: Free[tuple[str, ...]]
    """JSONL or JSON files of conversations: messages, ShareGPT or Alpaca; with --loss=dpo files of preferences.
    FILE:2 takes the records of a file twice, FILE:0.5 every second one"""
    loss: Literal["answers", "dpo"] = "answers"
    """what is learned; answers: to say what the assistant says in the data.
    dpo: to find the answers that the data prefers likelier than the others (direct preference optimisation)"""
    dpo_beta: float = 0.1
    """how far dpo holds the model to what it said before training; lower it to let the model move further away"""
    dpo_label_smoothing: float = 0.0
    """share of the preferences that may be the wrong way round, below 0.5; raise it for noisy data"""
    dpo_sft_weight: float = 0.0
    """weight of the preferred answers' own loss, per token, which dpo adds.
    Raise it, to 1 for example, where preferred answers become less likely too"""
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
    """learning rate of AdamW; auto: 1e-4 for an adapter, 1e-5 for every parameter, and a twentieth of that for dpo"""
    weight_decay: float = 0.0
    """decay of matrices and adapters"""
    warmup_ratio: float = 0.03
    """share of the run over which the learning rate rises; then it falls to 0 as a cosine"""
    max_length: int = 2048
    """tokens of a row, and of the longest conversation; a row holds several conversations that cannot see each other.
    With dpo a row holds both answers of a pair, each after its prompt"""
    too_long: TooLong = "cut"
    """conversations or pairs longer than a row: cut keeps their beginning, drop leaves them out"""
    checkpoint_activations: Free[bool] = False
    """keep only the inputs of layers for the backward pass and compute each layer again: less memory, a third slower"""
    offload_activations: Free[bool] = False
    """like --checkpoint_activations, and move these inputs to the host's memory until the backward pass"""
    out_tag: Annotated[Free[str | None], arg(aliases=["--out"])] = None
    """name of the result; default: the names of the model and of the first file"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise UserError("--data needs at least one file of conversations, got none: name one, such as a.jsonl", 2)

    @property
    def lora(self) -> LoraConfig | None:
        """The shape of the adapter, or None to train every parameter."""
        if self.lora_rank == 0:
            return None
        return LoraConfig(self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets, self.rslora)

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes each layer again."""
        return self.checkpoint_activations or self.offload_activations

    @property
    def preference(self) -> PreferenceLoss | None:
        """The loss of pairs of answers, or None to learn from conversations. UserError if a flag is out of range."""
        loss = PreferenceLoss(self.dpo_beta, self.dpo_label_smoothing, self.dpo_sft_weight)
        return loss if self.loss == "dpo" else None

    @property
    def rate(self) -> float:
        """The highest learning rate."""
        if self.learning_rate != "auto":
            return self.learning_rate
        return (1e-4 if self.lora_rank else 1e-5) * (1 if self.loss == "answers" else 0.05)

    @property
    def tag(self) -> str:
        """The name of the result."""
        first = Path(self.data[0].rpartition(":")[0] or self.data[0]).stem
        if self.out_tag is not None:
            return self.out_tag
        return f"{self.model.expanduser().resolve().name}-{first}"


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """The seed of what dropout drops in a step on a rank: the same after a resume, and what torch takes."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63


def train(cfg: Config, compute: Compute) -> None:
    """Fine-tune, resuming from the newest checkpoint if there is one."""
    lora, T, preference = cfg.lora, cfg.max_length, cfg.preference
    base = open_base(cfg.model, T, lora, compute, cfg.seed)
    base.model.checkpoints, base.model.offloads = cfg.recomputes, cfg.offload_activations
    conversations = own_pairs(cfg.data) if preference else own_conversations(cfg.data)
    stage = Stage("tune", cfg, compute, cfg.tag, parent=base.identity, corpus=conversations.name,
                  content=conversations.key)  # fmt: skip
    stage.about = base.about
    log(f"tune: {'an adapter of rank ' + str(lora.rank) if lora else 'every parameter'} of {base.folder.name}; "
        f"checkpoints go to {stage.folder}")  # fmt: skip

    answers, val_answers = chat_rows("tune", conversations, base.tokenizer, T, cfg.seed, True, cfg.too_long,
                                     pairs=preference is not None)  # fmt: skip
    batch = sizes.example_batch(cfg.target_examples_per_step, cfg.device_batch_size, base.model.config, base.held,
                                conversations.name, compute)  # fmt: skip
    steps = stage.steps_over(answers, batch.rows_per_step, conversations.name)
    rows = 1 if batch.probe else batch.device_batch_size
    check_fits(Tuning(base.model.config, lora, rows, batch.passes > 1, cfg.recomputes,
                      cfg.offload_activations, cfg.shard, compute.world_size, str(compute.dtype).removeprefix("torch."),
                      compute.platform.is_host), base.model, compute)  # fmt: skip
    stage.set_up(base.model, base.tokenizer, OneRate(cfg.rate, cfg.weight_decay), 1.0, fill=base.fill)
    if preference:  # before a checkpoint is loaded, the model is its own reference
        for rows in (answers, val_answers):
            add_references(rows, base.model, base.identity, batch.device_batch_size, compute)
    for examples in stage.train_rows(answers, batch, steps, val_answers, cfg.eval_every, of_what=" of the answers",
                                     objective=preference):  # fmt: skip
        seed_all(dropout_seed(cfg.seed, stage.step, compute.rank))
        stage.schedule(schedule.cosine(stage.step, steps, cfg.warmup_ratio))
        stage.conclude(stage.update(examples))


if __name__ == "__main__":
    launch(train, Config, __doc__)
