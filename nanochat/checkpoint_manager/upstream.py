"""Converts checkpoints of karpathy/nanochat's HEAD without running any code from their files.

An upstream folder such as base_checkpoints/d20 holds `model_NNNNNN.pt` and `meta_NNNNNN.json`. Next
to base_checkpoints is `tokenizer/tokenizer.pkl`. torch reads the model with weights_only. The
tokenizer is never unpickled: we walk the opcodes of its pickle and accept only plain data.
"""

import pickletools
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nanochat.checkpoint_manager.families import checked_shape
from nanochat.checkpoint_manager.files import FORMAT, publish, seal, step_dir, write_meta
from nanochat.checkpoint_manager.locate import STAGES, checkpoint_dir, make_meta
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, check_regular, read_json, tr
from nanochat.data.library_words import in_words
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import parallel
from nanochat.tokenizer import PATTERNS, ROLES, Tokenizer

# Prefix of a parameter's name -> the day since which every checkpoint of HEAD has had that
# parameter, newest first.
SINCE = {
    "smear_gate.weight": "2026-03-14",
    "value_embeds.": "2026-01-17",
    "resid_lambdas": "2026-01-11",
}
# The fields of upstream's GPTConfig. Ours has more, whose defaults describe upstream's models.
FIELDS = (
    "sequence_len",
    "vocab_size",
    "n_layer",
    "n_head",
    "n_kv_head",
    "n_embd",
    "window_pattern",
)


@dataclass(frozen=True)
class Upstream:
    """One step read from an upstream folder, with our names for its stage and its parameters."""

    stage: str
    tag: str
    step: int
    tensors: dict[str, Tensor]  # fp32
    shape: dict[str, Any]  # the meta file's model_config: FIELDS, and possibly more
    tokenizer: Tokenizer


# --- reading -------------------------------------------------------------------------------------


def read_step(folder: Path, step: int | None, tokenizer: Path | None) -> Upstream:
    """Read and return one step of an upstream folder such as `base_checkpoints/d20`.

    If `step` is None, the newest is read. `tokenizer` is the folder of tokenizer.pkl, by default
    `tokenizer` next to the parent of `folder`. Raises UserError if a file is missing or the stage
    is unknown (exit code 2), if a file is damaged, or if the checkpoint is too old.
    """
    step = _existing_step(folder, step)
    folder_path = folder.resolve()
    stage = _stage_of(folder_path)
    shape = _read_shape(folder / f"meta_{step:06d}.json")
    tensors = _tensors(folder / f"model_{step:06d}.pt")
    _refuse_older(folder, tensors, shape)
    base_folder = folder_path.parent.parent
    pickle_path = (tokenizer or base_folder / "tokenizer") / "tokenizer.pkl"
    return Upstream(stage, folder_path.name, step, tensors, shape, read_tokenizer(pickle_path))


def _existing_step(folder: Path, step: int | None) -> int:
    """Return `step`, or the newest step in the folder if `step` is None.

    Raises UserError (exit code 2) if the folder has no such step.
    """
    names = [path.stem.removeprefix("model_") for path in folder.glob("model_*.pt")]
    steps = sorted(int(name) for name in names if name.isdecimal())
    if not steps:
        raise UserError(
            tr(
                "{folder} has no model_NNNNNN.pt: name a folder such as "
                "base_checkpoints/d20 of karpathy/nanochat",
                folder=folder,
            ),
            2,
        )
    if step is None:
        return steps[-1]
    if step not in steps:
        raise UserError(
            tr(
                "{folder} has steps {steps}, not {step}: name one of them",
                folder=folder,
                steps=", ".join(map(str, steps)),
                step=step,
            ),
            exit_code=2,
        )
    return step


def _stage_of(folder: Path) -> str:
    """Return our name for the stage of an upstream folder, taken from the name of its parent.

    Raises UserError (exit code 2) if the parent is not named after a stage.
    """
    stages = {f"{name}_checkpoints": stage for stage, name in STAGES.items()}
    parent = folder.parent.name
    if parent not in stages:
        raise UserError(
            tr(
                "the folder above {name} must be named {stages}, because its name tells "
                "the stage, got {parent}: move {name} into a folder of that name",
                name=folder.name,
                stages=", ".join(stages),
                parent=parent,
            ),
            exit_code=2,
        )
    return stages[parent]


def _read_shape(path: Path) -> dict[str, Any]:
    """Return the model_config in a meta file.

    Raises UserError if there is none (exit code 2), or if the file is not JSON.
    """
    meta = read_json(path) if path.exists() else None
    shape = meta.get("model_config") if isinstance(meta, dict) else None
    if not isinstance(shape, dict):
        raise UserError(
            tr(
                "{path} is missing or has no model_config: copy the file again, since it "
                "describes the model",
                path=path,
            ),
            2,
        )
    return shape


def _tensors(path: Path) -> dict[str, Tensor]:
    """Return the parameters in a model file as fp32, under our names.

    Raises UserError if the file is damaged or holds anything but contiguous tensors.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as failure:  # torch raises many kinds of errors for a damaged or foreign file
        reason = str(failure).splitlines()[0]
        raise UserError(
            tr(
                "{path} cannot be read as plain tensors ({reason}): copy the file again",
                path=path,
                reason=reason,
            )
        ) from failure
    if not isinstance(state, Mapping) or not all(map(_is_plain, state.values())):
        raise UserError(
            tr(
                "{path} is not a table of tensors: name a checkpoint of karpathy/nanochat",
                path=path,
            )
        )
    tensors = {}
    for name, tensor in state.items():
        our_name = str(name).removeprefix("_orig_mod.").removeprefix("transformer.")
        tensors[our_name] = tensor.float()
    return tensors


def _is_plain(value: Any) -> bool:
    """Return whether a value is a contiguous tensor.

    Any other tensor could repeat its rows, and so be far larger than its file.
    """
    return isinstance(value, Tensor) and value.is_contiguous()


def _refuse_older(folder: Path, tensors: Mapping[str, Tensor], shape: Mapping[str, Any]) -> None:
    """Raise UserError if the model lacks a parameter of HEAD's models, or if `shape` lacks a field.

    A model without such a parameter is too old; the message estimates its date from the others.
    """

    def has(prefix: str) -> bool:
        return any(name.startswith(prefix) for name in tensors)

    dates = [date for prefix, date in SINCE.items() if has(prefix)]
    age = tr("of {date} or later", date=dates[0]) if dates else tr("of 2025")
    for prefix, since in SINCE.items():
        if not has(prefix):
            raise UserError(
                tr(
                    "{folder} is {age}: it has no {parameter}, which karpathy/nanochat has "
                    "had since {since}, so its model computes something else. Only "
                    "checkpoints of that day or later can be converted: train the model "
                    "again.",
                    folder=folder,
                    age=age,
                    parameter=prefix.rstrip("."),
                    since=since,
                )
            )
    missing = [field for field in FIELDS if field not in shape]
    if missing:
        raise UserError(
            tr(
                "{folder}: the meta file names no {missing} of the model, which the "
                "conversion needs: copy the meta file again, or add the values under "
                "model_config",
                folder=folder,
                missing=", ".join(missing),
            )
        )


# --- writing -------------------------------------------------------------------------------------


def convert(source: Upstream, corpus: str) -> Path:
    """Write an upstream step in our format, and return the path of the new step folder.

    The folder appears only once it is complete. The optimizer state is left out: the data has
    another order here, so the run could not be resumed. Raises UserError if the step already
    exists, or if the tensors or the tokenizer do not fit the model.
    """
    folder = checkpoint_dir(source.stage, source.tag)
    final = step_dir(folder, source.step)
    if final.exists():
        raise UserError(tr("{final} exists already: delete it to convert again", final=final))
    shape = _checked_model(source)
    temporary = folder / f".tmp-step_{source.step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files = {
            "model.safetensors": write_tensors(source.tensors, temporary / "model.safetensors")
        }
        source.tokenizer.save(temporary)
        files["tokenizer.json"] = seal(temporary / "tokenizer.json")
        settings = {"corpus": corpus, "converted": "karpathy/nanochat"}
        record = {
            "format": FORMAT,
            "step": source.step,
            "saved_at": time.time(),
            "world_size": 1,
            "tokenizer_hash": source.tokenizer.hash,
            "files": files,
            **make_meta(source.stage, shape, settings, source.step, {}),
        }
        write_meta(temporary, record)
        publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _checked_model(source: Upstream) -> GPTConfig:
    """Return the model's configuration.

    Raises UserError if it is invalid or does not fit the tensors or the tokenizer.
    """
    values = {field: source.shape[field] for field in FIELDS}
    where = tr("the meta file of {tag}, step {step:,},", tag=source.tag, step=source.step)
    shape = checked_shape(GPTConfig, values, where)
    with torch.device("meta"):
        model = GPT(shape)
    parallel.check_shapes(model, source.tensors)
    if source.tokenizer.vocab_size != shape.vocab_size:
        raise UserError(
            tr(
                "the tokenizer has {tokens:,} tokens, the model {rows:,}: name the folder of the "
                "right tokenizer with --tokenizer",
                tokens=source.tokenizer.vocab_size,
                rows=shape.vocab_size,
            )
        )
    return shape


# --- the tokenizer -------------------------------------------------------------------------------


def read_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer in a pickled tiktoken.Encoding, without unpickling it.

    Raises UserError if the file is missing (exit code 2) or is not a tokenizer of upstream's HEAD.
    """
    if not path.exists():
        raise UserError(
            tr("there is no tokenizer at {path}: name its folder with --tokenizer", path=path),
            exit_code=2,
        )
    try:
        check_regular(path)
        state = cast(dict[str, Any], plain(path.read_bytes()))
        tokens = _tokens_in_order(state)
        regex = state["pat_str"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, StopIteration) as failure:
        raise UserError(
            tr(
                "{path} is not a tokenizer of karpathy/nanochat's HEAD: {failure}. Name "
                "the folder of one with --tokenizer",
                path=path,
                failure=in_words(failure),
            )
        ) from failure
    pattern_names = {pattern: name for name, pattern in PATTERNS.items()}
    return Tokenizer(tokens, pattern_names.get(regex, "upstream"), regex)


def _tokens_in_order(state: dict[str, Any]) -> list[bytes]:
    """Return the ordinary tokens in a tiktoken state, in the order of their IDs.

    Raises ValueError if any token has an ID that upstream would not assign.
    """
    ranks = state["mergeable_ranks"]
    tokens = sorted(ranks, key=ranks.__getitem__)
    numbers = [ranks[token] for token in tokens]
    specials = {f"<|{role}|>": len(tokens) + i for i, role in enumerate(ROLES)}
    if numbers != list(range(len(tokens))) or state["special_tokens"] != specials:
        raise ValueError(
            tr("its token numbers differ from the numbers in karpathy/nanochat's tokenizers")
        )
    return tokens


# Opcodes that push their argument.
PUSHED = (
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "SHORT_BINBYTES",
    "BINBYTES",
    "BINBYTES8",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
)


class _Mark:
    """Marks the position on the pickle's stack where the items of a dict begin."""


def plain(data: bytes) -> Any:
    """Return the state of a pickled object without unpickling it.

    The state may consist only of dicts, empty tuples, str, bytes and int. The object's class is
    never looked up. Raises ValueError for any opcode that such a state does not need.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        elif name == "STOP":
            return stack.pop()
        elif name == "MARK":
            stack.append(_Mark())
        elif name in PUSHED:
            stack.append(argument)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[cast(int, argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[cast(int, argument)])
        elif name == "SETITEM":
            value = stack.pop()
            key = stack.pop()
            stack[-1].update({key: value})
        elif name == "SETITEMS":
            items = _pop_to_mark(stack)
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [("class", stack[-2], stack[-1])]
        elif name == "NEWOBJ":
            stack[-2:] = [{}]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].update(state)
        else:
            raise ValueError(tr("the pickle does more than hold data ({name})", name=name))
    raise ValueError(tr("the pickle has no end"))


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    """Pop the last mark and everything after it, and return what came after it, in order."""
    items = []
    item = stack.pop()
    while not isinstance(item, _Mark):
        items.append(item)
        item = stack.pop()
    return items[::-1]
