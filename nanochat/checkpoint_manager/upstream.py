"""Converts checkpoints of karpathy/nanochat's HEAD, without running any code that their files may contain.

A folder holds `model_NNNNNN.pt` and `meta_NNNNNN.json`; `tokenizer/tokenizer.pkl` is in the same base folder. torch
reads the model with weights_only. From the pickle of the tokenizer we take only plain data, by walking its opcodes.
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
from nanochat.common import UserError, check_regular, read_json
from nanochat.gpt import GPT, GPTConfig
from nanochat.runtime import parallel
from nanochat.tokenizer import PATTERNS, ROLES, Tokenizer

# Name of a parameter -> the day since which every checkpoint of HEAD has had it, newest first.
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
    """One step of an upstream folder, under our names."""

    stage: str
    tag: str
    step: int
    tensors: dict[str, Tensor]  # fp32
    shape: dict[str, Any]  # FIELDS, and whatever else the meta file's model_config holds
    tokenizer: Tokenizer


def read(folder: Path, step: int | None, tokenizer: Path | None) -> Upstream:
    """Read a step (default: the newest) of a folder such as `base_checkpoints/d20`.

    `tokenizer` is the folder of tokenizer.pkl (default: `tokenizer` in the same base folder). UserError (code 2) if a
    file is missing or the checkpoint is too old.
    """
    names = (path.stem.removeprefix("model_") for path in folder.glob("model_*.pt"))
    found = sorted(int(name) for name in names if name.isdecimal())
    if not found:
        raise UserError(
            f"{folder} has no model_NNNNNN.pt: name a folder such as base_checkpoints/d20 of karpathy/nanochat",
            2,
        )
    step = found[-1] if step is None else step
    if step not in found:
        raise UserError(
            f"{folder} has steps {', '.join(map(str, found))}, not {step}: name one of them",
            exit_code=2,
        )
    stages = {f"{name}_checkpoints": stage for stage, name in STAGES.items()}
    stage = stages.get(folder.resolve().parent.name)
    if stage is None:
        raise UserError(
            f"the folder above {folder.name} must be named {', '.join(stages)}, because its name tells the stage, got "
            f"{folder.resolve().parent.name}: move {folder.name} into a folder of that name",
            exit_code=2,
        )
    about = folder / f"meta_{step:06d}.json"
    meta = read_json(about) if about.exists() else None
    shape = meta.get("model_config") if isinstance(meta, dict) else None
    if not isinstance(shape, dict):
        raise UserError(
            f"{about} is missing or has no model_config: copy the file again, since it describes the model",
            2,
        )
    tensors = _tensors(folder / f"model_{step:06d}.pt")
    _refuse_older(folder, tensors, shape)
    pickled = (tokenizer or folder.resolve().parent.parent / "tokenizer") / "tokenizer.pkl"
    return Upstream(stage, folder.resolve().name, step, tensors, shape, read_tokenizer(pickled))


def _tensors(path: Path) -> dict[str, Tensor]:
    """The model's parameters in fp32, under our names."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as failure:  # an edge: torch's reader raises many kinds of errors on a damaged or foreign file
        reason = str(failure).splitlines()[0]
        raise UserError(
            f"{path} cannot be read as plain tensors ({reason}): copy the file again"
        ) from failure
    # A tensor that repeats its rows may be far larger than its file.
    whole = isinstance(state, Mapping) and all(
        isinstance(one, Tensor) and one.is_contiguous() for one in state.values()
    )
    if not whole:
        raise UserError(f"{path} is not a table of tensors: name a checkpoint of karpathy/nanochat")
    names = (str(name).removeprefix("_orig_mod.").removeprefix("transformer.") for name in state)
    return {name: value.float() for name, value in zip(names, state.values(), strict=True)}


def _refuse_older(folder: Path, tensors: Mapping[str, Tensor], shape: Mapping[str, Any]) -> None:
    """Raise a UserError that says how old the checkpoint is, if its model differs from HEAD's."""
    for name, since in SINCE.items():
        if not any(key.startswith(name) for key in tensors):
            oldest = next(
                (date for key, date in SINCE.items() if any(k.startswith(key) for k in tensors)),
                None,
            )
            age = f"of {oldest} or later" if oldest else "of 2025"
            raise UserError(
                f"{folder} is {age}: it has no {name.rstrip('.')}, which karpathy/nanochat has had since {since}, so "
                "its model computes something else. Only checkpoints of that day or later can be converted: train "
                "the model again."
            )
    missing = [key for key in FIELDS if key not in shape]
    if missing:
        raise UserError(
            f"{folder}: the meta file names no {', '.join(missing)} of the model, which the conversion needs: copy the "
            "meta file again, or add the values under model_config"
        )


def convert(theirs: Upstream, corpus: str) -> Path:
    """Write a step of karpathy/nanochat in our format, whole or not at all, and return its folder.

    The optimizer's state is left out: the rows of the data have another order here, so the run could not be resumed.
    UserError if the step exists already, or if tensors or tokenizer do not fit the model.
    """
    folder = checkpoint_dir(theirs.stage, theirs.tag)
    final = step_dir(folder, theirs.step)
    if final.exists():
        raise UserError(f"{final} exists already: delete it to convert again")
    named = {key: theirs.shape[key] for key in FIELDS}
    shape = checked_shape(GPTConfig, named, f"the meta file of {theirs.tag}, step {theirs.step:,},")
    with torch.device("meta"):
        model = GPT(shape)
    parallel.check_shapes(model, theirs.tensors)
    if theirs.tokenizer.vocab_size != shape.vocab_size:
        raise UserError(
            f"the tokenizer has {theirs.tokenizer.vocab_size:,} tokens, the model {shape.vocab_size:,}: name the "
            "folder of the right tokenizer with --tokenizer"
        )
    temporary = folder / f".tmp-step_{theirs.step:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        files = {
            "model.safetensors": write_tensors(theirs.tensors, temporary / "model.safetensors")
        }
        theirs.tokenizer.save(temporary)
        files["tokenizer.json"] = seal(temporary / "tokenizer.json")
        meta = make_meta(
            theirs.stage,
            shape,
            {"corpus": corpus, "converted": "karpathy/nanochat"},
            theirs.step,
            {},
        )
        record = {
            "format": FORMAT,
            "step": theirs.step,
            "saved_at": time.time(),
            "world_size": 1,
            "tokenizer_hash": theirs.tokenizer.hash,
            "files": files,
            **meta,
        }
        write_meta(temporary, record)
        publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


# --- the tokenizer -----------------------------------------------------------------------------------


def read_tokenizer(path: Path) -> Tokenizer:
    """Read the vocabulary of a pickled tiktoken.Encoding from its mergeable ranks, without running the pickle."""
    if not path.exists():
        raise UserError(
            f"there is no tokenizer at {path}: name its folder with --tokenizer", exit_code=2
        )
    try:
        check_regular(path)
        state = cast(dict[str, Any], plain(path.read_bytes()))
        ranks, specials = state["mergeable_ranks"], state["special_tokens"]
        order = sorted(ranks, key=ranks.__getitem__)
        expected = {f"<|{role}|>": len(order) + i for i, role in enumerate(ROLES)}
        if [ranks[token] for token in order] != list(range(len(order))) or specials != expected:
            raise ValueError(
                "its token numbers differ from the numbers in karpathy/nanochat's tokenizers"
            )
        regex = state["pat_str"]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, StopIteration) as failure:
        raise UserError(
            f"{path} is not a tokenizer of karpathy/nanochat's HEAD: {failure}. Name the folder of one with --tokenizer"
        ) from failure
    pattern = next((name for name, known in PATTERNS.items() if known == regex), "upstream")
    return Tokenizer(order, pattern, regex)


class _Mark:
    """Marks on the stack where a tuple or dict of a pickle starts."""


def plain(data: bytes) -> Any:
    """The state of the one object in a pickle that holds only plain data: dicts, tuples, str, bytes and int.

    The class of the object stays a name and is never looked up. ValueError for every opcode that plain data do not
    need.
    """
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        place = (
            len(stack)
            - 1
            - next(i for i, item in enumerate(reversed(stack)) if isinstance(item, _Mark))
        )
        items = stack[place + 1 :]
        del stack[place:]
        return items

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in ("PROTO", "FRAME"):
            continue
        elif name == "STOP":
            return stack.pop()
        elif name == "MARK":
            stack.append(_Mark())
        elif name in (
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
        ):
            stack.append(argument)
        elif name in ("EMPTY_DICT", "EMPTY_TUPLE"):
            stack.append({} if name == "EMPTY_DICT" else ())
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[cast(int, argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[cast(int, argument)])
        elif name in ("SETITEM", "SETITEMS"):
            items = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "STACK_GLOBAL":
            stack[-2:] = [("class", stack[-2], stack[-1])]
        elif name == "NEWOBJ":
            stack[-2:] = [{}]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].update(state)
        else:
            raise ValueError(f"the pickle does more than hold data ({name})")
    raise ValueError("the pickle has no end")
