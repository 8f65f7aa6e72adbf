"""A published model as the start of fine-tuning: its shape and tokenizer at once, its weights when it is sharded."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from nanochat import device
from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import folder_mark, load_weights, qwen_on_meta
from nanochat.device import Compute
from nanochat.models.lora import LoraConfig, add_adapters, first_values
from nanochat.models.qwen.model import Qwen
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

FROZEN = 8  # frozen parameters take as much memory as one that is trained: 2 bytes instead of 16


@dataclass(frozen=True)
class Base:
    """A published model that is going to be fine-tuned."""

    folder: Path
    model: Qwen  # on meta until fill() is called
    tokenizer: Tokenizer
    identity: str  # other weights, another identity
    about: dict[str, Any]  # what a checkpoint's meta.json says of the base
    lora: LoraConfig | None
    compute: Compute
    seed: int

    @property
    def held(self) -> int:
        """How many trained parameters would take as much memory as the model does."""
        trained = sum(parameter.numel() for _, parameter in parallel.trained(self.model))
        return trained + (self.model.parameter_counts()["total"] - trained) // FROZEN

    def with_rows_of(self, sequence_len: int) -> "Base":
        """The same model, still without values, for rows of `sequence_len` tokens."""
        return replace(self, model=_on_meta(self.folder, sequence_len, self.lora, self.compute))

    def fill(self) -> None:
        """Load the weights into what this rank holds of the model, which may be sharded by now, and give adapters their
        first values."""
        self.model.to_empty(device=self.compute.device)
        load_weights(self.model, self.folder)
        if self.lora is not None:
            parallel.load_whole(self.model, first_values(self.model, self.seed))


def open_base(
    folder: Path, sequence_len: int | None, lora: LoraConfig | None, compute: Compute, seed: int
) -> Base:
    """The model in a folder, ready to be sharded and filled, with rows of `sequence_len` tokens; None: as long as
    the model's context.

    With an adapter the matrices are frozen in the compute dtype; without one all parameters are fp32 masters. UserError
    if files are missing, damaged, of an unknown kind, or do not fit each other, or if rows are longer than the model's
    context.
    """
    folder = folder.expanduser().resolve()
    config = read_config(folder)
    tokenizer = FolderTokenizer(folder, config.vocab_size)
    model = _on_meta(folder, sequence_len, lora, compute)
    about: dict[str, Any] = {"model": asdict(config)}
    mark = folder_mark(folder)
    if lora is not None:
        about |= {"base": {"folder": str(folder), "mark": mark}, "lora": asdict(lora)}
    identity = f"{folder.name} {mark}"
    return Base(folder, model, cast(Tokenizer, tokenizer), identity, about, lora, compute, seed)


def _on_meta(
    folder: Path, sequence_len: int | None, lora: LoraConfig | None, compute: Compute
) -> Qwen:
    model = qwen_on_meta(
        folder, compute, device.MASTER if lora is None else compute.dtype, sequence_len
    )
    if lora is not None:
        add_adapters(model, lora)
    return model
