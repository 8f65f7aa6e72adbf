"""Loads the models to chat with: those trained here, published ones, and their adapters."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

from tyro.conf import arg

from nanochat.checkpoint_manager.load import (
    Loaded,
    adapter_without_base,
    load_model,
    load_published,
)
from nanochat.checkpoint_manager.locate import STAGES, trained
from nanochat.common import UserError, tr
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.adapters import Adapters
from nanochat.generate.drafts import (
    DRAFTED_CHATS,
    Drafts,
    Ngrams,
    SmallerModel,
    check_tokenizer,
)
from nanochat.gpt import GPT
from nanochat.model import Model
from nanochat.platforms.base import Platform
from nanochat.platforms.host import bound_primitives, give_freed_memory_back, unmap_unused_code
from nanochat.runtime import graphs

Source = Literal["base", "mid", "sft", "rl", "tune"]
# The longest chat in tokens without --context: the full context of a published model could fill all
# memory.
LONGEST = 4096
# The shortest chat that --context may ask for: with less, a short question and the marks of a chat
# template leave no room for an answer.
LEAST_CONTEXT = 32
# Chats at once and tokens of a chat that plan_caches() chooses among, and the share of the free
# memory that it gives to caches. Prompts that are read together need memory too.
MOST_SLOTS = 32
FEWEST_SLOTS = 4
SHORTEST = 512
FREE_SHARE = 0.8
MAX_TOKENS = 512  # of a reply, by default
LONGEST_NAME = 200  # letters in the name of an adapter, which clients use as a model's name


@dataclass(frozen=True)
class ModelFlags:
    """The flags that choose a model to chat with, and how it decodes."""

    source: Annotated[Source | None, arg(aliases=["-i"])] = None
    """Stage of the model. Default: the stage of the model whose training finished last."""
    model_tag: Annotated[str | None, arg(aliases=["-g"])] = None
    """Tag of the model, such as d20. Default: the tag of the model whose training finished last."""
    step: Annotated[int | None, arg(aliases=["-s"])] = None
    """Step of the checkpoint. Default: the last. Give an earlier step to compare it."""
    model: Path | None = None
    """Folder of a published Qwen or Llama model to chat with instead: config.json,
    tokenizer.json and safetensors files.
    Or OWNER/NAME, if hf or modelscope has downloaded that model."""
    weights: Literal["auto", "int8", "nf4"] = "auto"
    """Number format of the matrices. auto: that of the model, without a loss.
    int8: half the memory of bf16, on a CPU. Not for our own GPT; replies change a little.
    nf4: 4 bits below an adapter, as finetune --base_bits=4 trained it. Little memory, but slow."""
    graphs: bool | None = None
    """Replay every decoding step as one captured launch, on an NPU or a GPU. Default: on GPUs.
    An NPU needs TASK_QUEUE_ENABLE=1."""
    context: int | None = None
    """Longest chat in tokens, at least 32. Default: the context of the model, but at most 4,096,
    since memory grows with it. The server takes less if memory is short."""
    draft: str = ""
    """Guess tokens ahead while one or two chats are answered, so that the same replies come sooner.
    ngram: what followed the same words in the chat.
    STAGE/TAG, STAGE/TAG/STEP or a folder: what a smaller model of the same tokenizer says."""


@dataclass(frozen=True)
class Chosen:
    """A loaded model, how it decodes, and what the user is told about it."""

    loaded: Loaded
    context: int  # the longest chat in tokens
    other_models: list[str]  # for each of the other models, the flags that choose it
    latest: str = ""  # when the model was saved, if no flag names it: it is the last finished one
    state: str = ""  # how far the run is, if it is unfinished
    passed: str = ""  # the flags of a newer model that is unfinished or a trial
    parameters: int = 0  # the number of parameters of the model
    captures: Platform | None = None  # replays decoding steps; None if they are not replayed

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest reply, by default.

        A model that thinks before it answers gets half of the context, since its thoughts alone are
        often longer than the replies of others.
        """
        tokenizer = self.loaded.tokenizer
        if tokenizer.thought_marks is None or tokenizer.thinks_by_default is False:
            return MAX_TOKENS
        return max(MAX_TOKENS, self.context // 2)


def choose(
    flags: ModelFlags,
    compute: Compute,
    adapter: Path | None = None,
) -> Chosen:
    """Load and return the model that the flags name, by default the one that was trained last.

    `adapter` is the folder of an adapter to merge into a published model. Raises UserError if the
    flags are invalid, contradict each other or do not suit the device, or if the model cannot be
    loaded.
    """
    captures = graphs.for_replies(flags.graphs, compute)
    names_trained = bool(flags.source or flags.model_tag or flags.step)
    bits = 4 if flags.weights == "nf4" else 16
    if flags.model is None and adapter is not None:
        raise adapter_without_base()
    if flags.model is not None and names_trained:
        raise UserError(
            tr(
                "--model names a published model, and -i, -g and -s one that was trained "
                "here: give either"
            ),
            2,
        )
    if flags.model is not None:
        loaded = load_published(flags.model, adapter, compute, bits=bits)
        other_models: list[str] = []
        latest = state = passed = ""
    else:
        models = trained(flags.source, flags.model_tag)
        newest = models[0]
        last = max(models, key=lambda model: model.saved_at)
        passed = "" if last == newest or names_trained else last.flags
        loaded = load_model(newest.stage, newest.tag, flags.step, compute, bits=bits)
        other_models = newest.alternatives()
        latest = "" if names_trained or newest.unfinished else newest.saved
        state = newest.state
    if captures is not None and has_experts(loaded.model):
        if flags.graphs:
            raise UserError(
                tr(
                    "--graphs was asked for, but the experts of this model choose what is "
                    "computed, and a graph repeats what it captured. Leave --graphs out."
                ),
                exit_code=2,
            )
        captures = None
    parameters = loaded.model.parameter_counts()["total"]
    _lay_out(flags, loaded, compute)
    return Chosen(
        loaded,
        _context(flags, loaded),
        other_models,
        latest,
        state,
        passed,
        parameters,
        captures,
    )


def _lay_out(
    flags: ModelFlags,
    loaded: Loaded,
    compute: Compute,
) -> None:
    """Store the model's matrices in the format of --weights, laid out for the device.

    Matrices in 4 bits were loaded as such. Raises UserError (exit code 2) if the flags ask for 8-bit
    matrices, but these are unsupported or no faster here.
    """
    if flags.weights == "int8":
        reason = _no_int8(loaded, compute)
        if reason:
            raise UserError(
                tr(
                    "--weights int8 was asked for, but {reason}. Leave --weights out.",
                    reason=reason,
                ),
                exit_code=2,
            )
        from nanochat.models.qwen.int8 import hold_in_int8

        hold_in_int8(loaded.model)
    bound_primitives()
    compute.operations.serve(loaded.model)
    give_freed_memory_back()  # memory of the weights in their former layout
    unmap_unused_code()


def _no_int8(loaded: Loaded, compute: Compute) -> str:
    """Return why 8-bit matrices are unsupported or no faster here, or "" if they help."""
    reason = compute.platform.int8_missing(compute.dtype)
    if reason:
        return reason
    if isinstance(loaded.model, GPT):
        return tr("this is no Qwen or Llama model, and no other family has matrices in 8 bits")
    if has_experts(loaded.model):
        return tr("the experts of this model, which are most of it, have no form in 8 bits")
    return ""


def has_experts(model: Model) -> bool:
    """Return whether a model has layers with mixtures of experts."""
    return getattr(model.config, "has_experts", False)


def choose_also(
    value: str,
    flags: ModelFlags,
    compute: Compute,
) -> tuple[str, Chosen]:
    """Load the model that a value of --also asks for, and return its name and the model.

    The value is STAGE/TAG, STAGE/TAG/STEP or NAME=FOLDER. The first model's weights, graphs and
    context (in `flags`) apply. Raises UserError if the value cannot be parsed (exit code 2), or if
    the model cannot be loaded with these flags.
    """
    shared = ModelFlags(weights=flags.weights, graphs=flags.graphs, context=flags.context)
    name, _, folder = value.partition("=")
    if name and folder:
        published = replace(shared, model=Path(folder).expanduser())
        return name, choose(published, compute)
    stage, _, tag_and_step = value.partition("/")
    tag, _, step = tag_and_step.partition("/")
    if stage not in STAGES or not tag or not (step.isdecimal() or not step):
        raise UserError(
            tr(
                "--also must be STAGE/TAG or STAGE/TAG/STEP with a stage of {stages}, such "
                "as sft/d4, or NAME=FOLDER, got {value!r}",
                stages=", ".join(STAGES),
                value=value,
            ),
            exit_code=2,
        )
    step_number = int(step) if step else None
    source = cast(Source, stage)
    trained_here = replace(shared, source=source, model_tag=tag, step=step_number)
    name_parts = ["nanochat", stage, tag, step]
    return "-".join(filter(None, name_parts)), choose(trained_here, compute)


def names_adapter(value: str) -> bool:
    """Return whether a value of --also, such as NAME=FOLDER, gives the folder of an adapter."""
    from nanochat.checkpoint_manager.huggingface.peft_settings import SETTINGS as ADAPTER_SETTINGS

    _, _, folder = value.partition("=")
    return bool(folder) and (Path(folder).expanduser() / ADAPTER_SETTINGS).is_file()


def adapter_folders(values: Sequence[str], model: Path | None) -> dict[str, Path]:
    """Return the adapters that `values` name, as a dict from name to folder.

    Each of these values of --adapter or --also is NAME=FOLDER, or FOLDER alone, whose last
    component is then the name. Raises UserError (exit code 2) if a value is malformed, if two
    adapters have the same name, or if there are values but no base model (`model` is None).
    """
    if values and model is None:
        raise adapter_without_base()
    from nanochat.checkpoint_manager.huggingface.folders import model_name, published_folder
    from nanochat.checkpoint_manager.huggingface.peft_settings import SETTINGS as ADAPTER_SETTINGS

    folders: dict[str, Path] = {}
    for value in values:
        name, equals, path = value.partition("=")
        folder = published_folder(Path(path if equals else value), ADAPTER_SETTINGS)
        if not equals:
            name = model_name(folder)
        if not name or (equals and not path):
            raise UserError(
                tr("--adapter must be NAME=FOLDER or FOLDER, got {value!r}", value=value),
                exit_code=2,
            )
        if not name.isprintable() or "/" in name or len(name) > LONGEST_NAME:
            raise UserError(
                tr(
                    "the name of an adapter must be at most {longest_name} letters without "
                    "slashes and control characters, got {short}: write NAME=FOLDER",
                    longest_name=LONGEST_NAME,
                    short=reprlib.repr(name),
                ),
                2,
            )
        if name in folders:
            raise UserError(
                tr(
                    "two adapters would have the name {name!r}: give one another name, as "
                    "NAME=FOLDER",
                    name=name,
                ),
                2,
            )
        folders[name] = folder
    return folders


def load_adapters(
    first: Chosen,
    folders: Mapping[str, Path],
    compute: Compute,
) -> Adapters | None:
    """Load and return the adapters for the chosen model `first`, or None if there are none.

    `folders` maps the name of each adapter to its folder. Raises UserError if an adapter cannot be
    read, belongs to another base model, or can only be merged.
    """
    if not folders:
        return None
    model = first.loaded.model
    from nanochat.checkpoint_manager.huggingface.adapter import part_to_merge, read_adapter

    adapters = {name: read_adapter(model, folder) for name, folder in folders.items()}
    for name, adapter in adapters.items():
        part = part_to_merge(adapter)
        if part:
            raise UserError(
                tr(
                    "the adapter {name!r} has {part}, and a server that answers with several "
                    "adapters adds only low-rank products to the matrices inside layers. Merge "
                    "it with `python -m nanochat.export MERGED --model BASE --adapter "
                    "{folders}`, and serve MERGED with --model",
                    name=name,
                    part=part,
                    folders=folders[name],
                ),
                exit_code=2,
            )
    return Adapters(model, adapters, model.dtype, compute.device)


def drafts_for(
    flags: ModelFlags,
    chosen: Chosen,
    compute: Compute,
) -> Drafts | None:
    """Return what guesses the tokens of the chosen model, as --draft says, or None without it.

    Raises UserError (exit code 2) if the smaller model that the flag names has another tokenizer,
    or keeps states that a wrong guess would spoil.
    """
    if not flags.draft:
        return None
    if flags.draft == "ngram":
        return Drafts(Ngrams())
    stage, slash, _ = flags.draft.partition("/")
    is_trained_here = slash and stage in STAGES
    value = flags.draft if is_trained_here else f"draft={flags.draft}"
    _, smaller = choose_also(value, ModelFlags(graphs=False), compute)
    tokenizer = smaller.loaded.tokenizer
    check_tokenizer(chosen.loaded.tokenizer, tokenizer, flags.draft)
    length = min(chosen.context, smaller.loaded.model.config.sequence_len)
    engine = Engine(smaller.loaded.model, tokenizer, DRAFTED_CHATS, length)
    if not engine.cuts_anywhere:
        raise UserError(
            tr(
                "--draft {name}: this model has layers that cannot forget a wrong guess "
                "(DeltaNets): name a model of attention layers, or give --draft ngram",
                name=flags.draft,
            ),
            exit_code=2,
        )
    return Drafts(SmallerModel(engine))


@dataclass(frozen=True)
class Caches:
    """How many chats every model answers at once, and the memory for them."""

    slots: int
    contexts: list[int]  # the longest chat of each model in tokens
    sizes: list[int]  # bytes of each model's cache


def plan_caches(
    models: Sequence[Chosen],
    slots: int | Literal["auto"],
    context: int | None,
    platform: Platform,
) -> Caches:
    """Choose the slots and contexts of the models so that their caches fit into the free memory.

    `slots` and `context` are the flags, which apply to all models. With "auto" there are up to 32
    slots in four fifths of the free memory. Without a context, chats become shorter, down to 512
    tokens, before there are fewer than 4 slots, or fewer than asked for. Raises UserError with the
    flag that fits if there is too little memory. Without this check, a server on a CPU would start,
    and run out of memory only later, while answering.
    """
    free = platform.memory_free()
    room = int(FREE_SHARE * free) if slots == "auto" else free
    contexts = [model.context for model in models]
    while True:
        sizes = _slot_sizes(models, contexts)
        fitting = room // sum(sizes)
        fewest = FEWEST_SLOTS if slots == "auto" else slots
        if fitting >= fewest or context is not None or max(contexts) <= SHORTEST:
            break
        contexts = [min(length, max(SHORTEST, length // 2)) for length in contexts]
    count = min(fitting, MOST_SLOTS) if slots == "auto" else slots
    if 0 < count <= fitting:
        return Caches(count, contexts, [count * size for size in sizes])
    total = max(count, 1) * sum(sizes)
    tokens = tr(" and ").join(f"{length:,}" for length in contexts)
    advice = f"--slots {fitting}"
    if fitting < 1:
        advice = f"--slots 1 --context {max(LEAST_CONTEXT, room * max(contexts) // total)}"
    raise UserError(
        tr(
            "the cache of {count} slots x {tokens} tokens takes {total:.1f} GB, and "
            "{free:.1f} GB of memory are free: give {advice}, or free memory",
            count=max(count, 1),
            tokens=tokens,
            total=total / 1e9,
            free=free / 1e9,
            advice=advice,
        )
    )


def _slot_sizes(models: Sequence[Chosen], contexts: Sequence[int]) -> list[int]:
    """Return the bytes that one slot of each model takes with these contexts."""
    pairs = zip(models, contexts, strict=True)
    return [model.loaded.model.new_cache(1, length).bytes for model, length in pairs]


def _context(flags: ModelFlags, loaded: Loaded) -> int:
    """Return how many tokens a chat may have.

    Raises UserError (exit code 2) if --context is out of range.
    """
    longest = loaded.model.config.sequence_len
    default = min(longest, LONGEST)
    least = min(LEAST_CONTEXT, longest)
    if flags.context is not None and not least <= flags.context <= longest:
        raise UserError(
            tr(
                "--context must be from {least} to {longest:,}, the context of {model}, got "
                "{context:,}: give a number in this range, or leave the flag out to take "
                "{default:,}",
                least=least,
                longest=longest,
                model=loaded.tag,
                context=flags.context,
                default=default,
            ),
            exit_code=2,
        )
    return flags.context or default
