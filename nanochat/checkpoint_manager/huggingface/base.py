"""Opens a published model to fine-tune it.

The shape and the tokenizer are read immediately, and the weights once the model has been sharded.
"""

import itertools
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from nanochat import device
from nanochat.checkpoint_manager.huggingface.adapter import BASE_BITS
from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.folders import published_folder
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import folder_mark, load_weights, qwen_on_meta
from nanochat.checkpoint_manager.same_run import BASE_FACT
from nanochat.common import UserError, tr, warn
from nanochat.data.conversation import Conversation, assistant, user
from nanochat.device import Compute
from nanochat.models.lora import LoraConfig, add_adapters, first_values
from nanochat.models.nf4 import nf4_entries
from nanochat.models.qwen.model import Qwen
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

# A trained parameter takes 16 bytes, as much as eight frozen ones of 2 bytes, or 31 of 4.13 bits.
FROZEN_PER_TRAINED = 8
PACKED_PER_TRAINED = 31


@dataclass(frozen=True)
class Base:
    """A published model that is to be fine-tuned."""

    folder: Path
    model: Qwen  # on meta until fill() is called
    tokenizer: Tokenizer
    identity: str  # differs if the weights differ
    about: dict[str, Any]  # what meta.json says about the base
    lora: LoraConfig | None
    bits: int  # 4: the frozen matrices are in NF4; 16: they are in the compute dtype
    compute: Compute
    seed: int

    @property
    def outputs(self) -> str:
        """A text that differs if the model computes something else before it is trained.

        config.json may change beside the same weights, and 4 bits compute something else than 16.
        """
        return f"{self.identity} {self.about['model']} {self.bits} bits"

    @property
    def facts(self) -> dict[str, str]:
        """What must be the same when a run resumes, beside the weights."""
        content = f"{self.about['model']} {self.tokenizer.chat_hash}"
        return {BASE_FACT: sha256(content.encode()).hexdigest()[:16]}

    @property
    def equivalent_parameters(self) -> int:
        """The number of trained parameters that would take as much memory as this model."""
        trained = sum(parameter.numel() for _, parameter in parallel.trained(self.model))
        packed = nf4_entries(self.model)
        frozen = self.model.parameter_counts()["total"] - trained - packed
        return trained + frozen // FROZEN_PER_TRAINED + packed // PACKED_PER_TRAINED

    def warn_if_replies_never_end(self) -> None:
        """Warn if the chat template writes no token after a reply that ends generation.

        What is trained then never ends a reply.
        """
        exchange = Conversation((user("Q"), assistant("A")))
        try:
            rendered = self.tokenizer.render(exchange)
        except UserError:
            return  # a template that wants more than a question and its answer
        trained = set(itertools.compress(rendered.ids, rendered.mask))
        if trained.isdisjoint(self.tokenizer.stops):
            warn(
                tr(
                    "the chat template in {folder} ends a reply without a token that ends "
                    "generation, so the model does not learn where to stop. Check eos_token and "
                    "the template, or limit replies with --max_tokens",
                    folder=self.folder,
                )
            )

    def with_rows_of(self, sequence_len: int) -> "Base":
        """Return this base with a new, unfilled model for rows of `sequence_len` tokens."""
        model = _on_meta(self.folder, sequence_len, self.lora, self.bits, self.compute)
        return replace(self, model=model)

    def fill(self) -> None:
        """Load the weights, and initialise the adapters, if any.

        The model may be sharded already: each rank loads only the rows that it holds.
        """
        self.model.to_empty(device=self.compute.device)
        load_weights(self.model, self.folder)
        if self.lora is not None:
            parallel.load_whole(self.model, first_values(self.model, self.seed))


def open_base(
    folder: Path,
    sequence_len: int | None,
    lora: LoraConfig | None,
    compute: Compute,
    seed: int,
    bits: int = 16,
) -> Base:
    """Return the published model in a folder, ready to be sharded and filled.

    Rows have `sequence_len` tokens or, if that is None, fill the model's context. With `lora`, the
    model gets adapters and is otherwise frozen, with its matrices in the compute dtype or, if `bits`
    is 4, in NF4. Without it, all parameters are trained in fp32. Raises UserError if files are
    missing, damaged, unsupported or do not fit each other, if rows are longer than the context, or
    if a model with experts is to be held in 4 bits.
    """
    folder = published_folder(folder)
    config = read_config(folder)
    tokenizer = FolderTokenizer(folder, config.vocab_size)
    model = _on_meta(folder, sequence_len, lora, bits, compute)
    about: dict[str, Any] = {"model": asdict(config)}
    mark = folder_mark(folder)
    if lora is not None:
        base = {"folder": str(folder), "mark": mark, BASE_BITS: bits}
        about |= {"base": base, "lora": asdict(lora)}
    identity = f"{folder.name} {mark}"
    return Base(
        folder, model, cast(Tokenizer, tokenizer), identity, about, lora, bits, compute, seed
    )


def _on_meta(
    folder: Path,
    sequence_len: int | None,
    lora: LoraConfig | None,
    bits: int,
    compute: Compute,
) -> Qwen:
    dtype = device.MASTER if lora is None else compute.dtype
    model = qwen_on_meta(folder, compute, dtype, sequence_len, bits)
    if lora is not None:
        add_adapters(model, lora)
    return model
