"""Which model a chat is with: one that was trained here, or the folder of a published one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from tyro.conf import arg

from nanochat.checkpoint_manager.huggingface.adapter import SETTINGS as ADAPTER_SETTINGS
from nanochat.checkpoint_manager.huggingface.adapter import read_adapter
from nanochat.checkpoint_manager.load import Loaded, load_model, load_published
from nanochat.checkpoint_manager.locate import STAGES, trained
from nanochat.common import UserError
from nanochat.device import DTYPES, Compute
from nanochat.generate.adapters import Adapters
from nanochat.models.qwen.int8 import hold_in_int8
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.base import Platform
from nanochat.runtime import graphs

Source = Literal["base", "mid", "sft", "rl", "tune"]
NEEDS_BASE = "--adapter belongs to a published model: name its folder with --model"
LONGEST = 4096  # tokens of a chat where nobody says more: the contexts of published models would take all memory


@dataclass(frozen=True)
class ModelFlags:
    """The flags that choose a model to chat with, and how it decodes."""

    source: Annotated[Source | None, arg(aliases=["-i"])] = None
    """Stage of the model. Default: the stage of the model that was trained last."""
    model_tag: Annotated[str | None, arg(aliases=["-g"])] = None
    """Tag of the model, such as d20. Default: the tag of the model that was trained last."""
    step: Annotated[int | None, arg(aliases=["-s"])] = None
    """Step of the checkpoint. Default: the last. Give an earlier step to compare it."""
    model: Path | None = None
    """Folder of a published Qwen model to chat with instead: config.json, tokenizer.json and safetensors files."""
    weights: Literal["auto", "int8"] = "auto"
    """Number format of the matrices. auto: the same as the computation. int8: half the memory, on a CPU that uses bf16.
    Qwen models only; replies change a little."""
    graphs: bool | None = None
    """Replay every decoding step as one captured launch, on an NPU or a GPU. Default: on GPUs.
    An NPU needs TASK_QUEUE_ENABLE=1."""
    context: int | None = None
    """Longest chat in tokens. Default: the context of the model, but at most 4,096, since memory grows with it."""


@dataclass(frozen=True)
class Chosen:
    """The model, the longest chat in tokens, the flags of the other models, and when it was saved if it is the last."""

    loaded: Loaded
    context: int
    others: list[str]
    latest: str = ""
    parameters: int = 0  # how many the model has
    captures: Platform | None = None  # what replays decoding steps, if they are to be replayed


def choose(flags: ModelFlags, dtype: str, compute: Compute, adapter: Path | None = None) -> Chosen:
    """Load the model that the flags name, in the number format `dtype` (auto: the device's), with the adapter of a
    folder merged into it. UserError if the flags do not go together or the model cannot be loaded."""
    if dtype != "auto":
        compute = replace(compute, dtype=DTYPES[dtype], dtype_reason="--dtype")
    captures = graphs.for_replies(flags.graphs, compute)
    given = bool(flags.source or flags.model_tag or flags.step)
    if flags.model is None and adapter is not None:
        raise UserError(NEEDS_BASE, exit_code=2)
    if flags.model is not None and given:
        raise UserError(
            "--model names a published model, and -i, -g and -s one that was trained here: give either",
            2,
        )
    if flags.model is not None:
        loaded = load_published(flags.model, adapter, compute)
        parameters = _held(flags, loaded, compute)
        return Chosen(loaded, _context(flags, loaded), [], "", parameters, captures)
    newest = trained(flags.source, flags.model_tag)[0]
    loaded = load_model(newest.stage, newest.tag, flags.step, compute)
    parameters, latest = _held(flags, loaded, compute), "" if given else newest.saved
    return Chosen(
        loaded, _context(flags, loaded), newest.alternatives(), latest, parameters, captures
    )


def _held(flags: ModelFlags, loaded: Loaded, compute: Compute) -> int:
    """Hold the model's matrices as --weights says, laid out for the device, and return how many parameters it has.
    UserError if 8 bits would not make it faster here."""
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    if flags.weights == "int8":
        why = ""
        if not compute.platform.is_host:
            why = f"8-bit matrices are for CPUs, and this device is {compute.device_type}"
        elif compute.dtype != torch.bfloat16:
            used = str(compute.dtype).removeprefix("torch.")
            why = f"8-bit matrices are faster only where a CPU computes in bfloat16, and this one computes in {used}"
        elif not isinstance(loaded.model, Qwen):
            why = "this is no Qwen model, and no other family has matrices in 8 bits"
        if why:
            raise UserError(
                f"--weights int8 was asked for, but {why}. Leave --weights out.", exit_code=2
            )
        hold_in_int8(loaded.model)
    compute.operations.serve(loaded.model)
    return parameters


def choose_also(words: str, flags: ModelFlags, dtype: str, compute: Compute) -> tuple[str, Chosen]:
    """The name and the model that a value of --also asks for: STAGE/TAG, STAGE/TAG/STEP or NAME=FOLDER. `flags` are
    those of the first model. UserError if the value cannot be read or loaded."""
    name, equals, place = words.partition("=")
    if equals and name and place:
        own = ModelFlags(
            model=Path(place).expanduser(),
            weights=flags.weights,
            graphs=flags.graphs,
            context=flags.context,
        )
        return name, choose(own, dtype, compute)
    stage, _, rest = words.partition("/")
    tag, _, step = rest.partition("/")
    if stage not in STAGES or not tag or not (step.isdecimal() or not step):
        raise UserError(
            f"--also must be STAGE/TAG or STAGE/TAG/STEP with a stage of {', '.join(STAGES)}, such as sft/d4, or "
            f"NAME=FOLDER, got {words!r}",
            exit_code=2,
        )
    source, number = cast(Source, stage), int(step) if step else None
    own = ModelFlags(
        source, tag, number, weights=flags.weights, graphs=flags.graphs, context=flags.context
    )
    return "-".join(filter(None, ("nanochat", stage, tag, step))), choose(own, dtype, compute)


def names_adapter(words: str) -> bool:
    """Whether a value of --also, NAME=FOLDER, is an adapter's."""
    _, _, place = words.partition("=")
    return bool(place) and (Path(place).expanduser() / ADAPTER_SETTINGS).is_file()


def adapter_folders(values: Sequence[str], model: Path | None) -> dict[str, Path]:
    """The folders of the adapters that values of --adapter or --also ask for, by name: NAME=FOLDER, or FOLDER, whose
    own name is then the adapter's. UserError if there is no folder of a base, `model`, or a name is given twice."""
    if values and model is None:
        raise UserError(NEEDS_BASE, exit_code=2)
    found: dict[str, Path] = {}
    for words in values:
        name, equals, place = words.partition("=")
        folder = Path(place if equals else words).expanduser().resolve()
        name = name if equals else folder.name
        if not name or (equals and not place):
            raise UserError(f"--adapter must be NAME=FOLDER or FOLDER, got {words!r}", exit_code=2)
        if name in found:
            raise UserError(
                f"two adapters would have the name {name!r}: give one another name, as NAME=FOLDER",
                2,
            )
        found[name] = folder
    return found


def hold_adapters(first: Chosen, folders: Mapping[str, Path], compute: Compute) -> Adapters | None:
    """The adapters of folders, held beside the model that was chosen; None if there are none. UserError if one cannot
    be read or is of another base."""
    model = first.loaded.model
    if not folders:
        return None
    given = {name: read_adapter(model, folder) for name, folder in folders.items()}
    return Adapters(model, given, model.dtype, compute.device)


def cache_sizes(chosen: Sequence[Chosen], slots: int, platform: Platform) -> list[int]:
    """The bytes of the cache of each model for so many slots.

    UserError if the device has less memory left than all of these caches take together, which a CPU
    would find out only while it answers.
    """
    ones = [each.loaded.model.new_cache(1, each.context).bytes for each in chosen]
    total, free = slots * sum(ones), platform.memory_free()
    if total > free:
        tokens = " and ".join(f"{each.context:,}" for each in chosen)
        raise UserError(
            f"the cache of {slots} slots x {tokens} tokens takes {total / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            f"memory are free, enough for {free // sum(ones)} slots: lower --slots or --context, or free memory"
        )
    return [slots * one for one in ones]


def _context(flags: ModelFlags, loaded: Loaded) -> int:
    most = loaded.model.config.sequence_len
    if flags.context is not None and not 2 <= flags.context <= most:
        raise UserError(
            f"--context must be from 2 to {most:,}, the context of this model, got {flags.context:,}",
            exit_code=2,
        )
    return flags.context or min(most, LONGEST)
