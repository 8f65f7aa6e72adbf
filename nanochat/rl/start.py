"""Opens the published or fine-tuned model that RL starts from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from nanochat import device
from nanochat.checkpoint_manager.files import read_meta, step_dir
from nanochat.checkpoint_manager.huggingface.adapter import base_bits, tell_base_bits
from nanochat.checkpoint_manager.huggingface.base import Base, open_base
from nanochat.checkpoint_manager.huggingface.folders import model_name
from nanochat.checkpoint_manager.load import base_of_adapter
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent
from nanochat.checkpoint_manager.parts.model import read_parameters
from nanochat.common import UserError, tr
from nanochat.device import Compute
from nanochat.models.lora import Adapter, LoraConfig, delta, for_stack, stack_of
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

RANK = 8  # the default rank of an adapter


@dataclass(frozen=True)
class Start:
    """The model that RL starts from, and how its checkpoints describe it."""

    name: str  # from which the tag of the result is made
    identity: str  # differs if the weights differ
    corpus: str | None  # the corpus of a model that was trained here
    load: Callable[[], tuple[Any, Tokenizer]]  # a model of any family, and its tokenizer
    # Sets the parameters of a model that load() returns on meta, once it has been sharded.
    fill: Callable[[], None] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # for meta.json
    # What must be the same when a run resumes, beside the weights.
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_adapter(self) -> bool:
        """Whether an adapter is trained, and the model itself is frozen."""
        return "lora" in self.about


def _of_base(name: str, identity: str, base: Base, adapter: Adapter | None = None) -> Start:
    """Return a published model as a start, with the fine-tuned adapter to begin with, if any.

    If every parameter is trained, the adapter is merged.
    """

    def fill() -> None:
        base.fill()
        if adapter is not None and base.lora is None:
            _merge_rows(base, adapter)
        elif adapter is not None:
            parallel.load_whole(base.model, adapter.values)

    def load() -> tuple[Any, Tokenizer]:
        return base.model, base.tokenizer

    return Start(name, identity, None, load, fill, base.about, base.facts)


def open_published(
    model: Path, rank: int | None, alpha: float, compute: Compute, seed: int
) -> Start:
    """Return the published model in a folder as a start.

    `rank` is that of the adapter that is trained; 0 trains every parameter, and None is 8. Raises
    UserError as open_base() does.
    """
    base = open_base(model, None, _lora(rank, alpha), compute, seed)
    name = model_name(base.folder).rpartition("/")[2]
    return _of_base(name, base.identity, base)


def open_tuned(
    tag: str | None, step: int | None, rank: int | None, alpha: float, compute: Compute, seed: int
) -> Start:
    """Return a result of scripts.finetune as a start.

    `tag` and `step` are chosen by find_parent() if they are None. An adapter is trained further, at
    its own rank and alpha, unless `rank` is 0: then it is merged, and every parameter is trained.
    A model that was tuned as a whole gets an adapter as in open_published(). Raises UserError (exit
    code 2) if there is no such result, or if an adapter has another rank than `rank` or another alpha
    than `alpha`, unless that is the default.
    """
    parent = find_parent("tune", tag, step)
    folder = checkpoint_dir("tune", parent.tag)
    where = step_dir(folder, parent.step)
    meta = read_meta(folder, parent.step)
    if "base" not in meta:
        base = open_base(where, None, _lora(rank, alpha), compute, seed)
        return _of_base(parent.tag, parent.identity, base)
    base_folder, tuned = base_of_adapter(meta, where)
    lora = replace(tuned, dropout=0.0)  # the sampler has none, and must compute the same
    new_rank = rank not in (None, lora.rank)
    if rank != 0 and (new_rank or alpha not in (LoraConfig.alpha, lora.alpha)):
        raise UserError(
            tr(
                "{tag} is an adapter of rank {own_rank} and alpha {own_alpha:g}, which is trained "
                "further as it is, got {flag}: leave that flag out, or merge the adapter and train "
                "every parameter with --lora_rank=0",
                tag=parent.tag,
                own_rank=lora.rank,
                own_alpha=lora.alpha,
                flag=f"--lora_rank={rank}" if new_rank else f"--lora_alpha={alpha:g}",
            ),
            exit_code=2,
        )
    base = open_base(base_folder, None, None if rank == 0 else lora, compute, seed)
    tell_base_bits(base_bits(meta), base.model, where)
    values = read_parameters(where)
    tensors = {name: values[name][: values[name].shape[0]] for name in values}
    modules = {name.rpartition(".lora_")[0] for name in tensors}
    configs = {module: for_stack(lora, stack) for module in modules if (stack := stack_of(module))}
    return _of_base(parent.tag, parent.identity, base, Adapter(lora, tensors, configs))


def _lora(rank: int | None, alpha: float) -> LoraConfig | None:
    """Return the shape of a new adapter, or None if the rank is 0."""
    if rank == 0:
        return None
    return LoraConfig(RANK if rank is None else rank, alpha)


@torch.no_grad()
def _merge_rows(base: Base, adapter: Adapter) -> None:
    """Add an adapter to the rows of the matrices, or the experts of the stacks, of this rank."""
    ends = ".lora_A.weight"
    for value_name in adapter.values:
        if not value_name.endswith(ends):
            continue
        module = value_name.removesuffix(ends)
        parameter = base.model.get_parameter(stack_of(module) or f"{module}.weight")
        local_rows = device.local(parameter)
        first = parallel.place_of(parameter).first_row(parameter.shape[0])
        change = delta(adapter, module, local_rows.device)
        local_rows += change[first : first + local_rows.shape[0]]
