"""Loads the safetensors of a published model, parameter by parameter, straight to where each is needed."""

import contextlib
import hashlib
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat.checkpoint_manager.families import held_in, on_meta
from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.parts.index import INDEX
from nanochat.common import UserError, log, read_json
from nanochat.device import Compute, local
from nanochat.models.qwen.model import Qwen
from nanochat.runtime import parallel

MARKED = 1 << 20  # bytes at the beginning and at the end of a file that folder_mark() reads
SINGLE = "model.safetensors"
SKIPPED = {"visual.": "the vision tower", "mtp.": "the multi-token heads"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LONGEST_NAME = 200  # characters of a file's name
COMPARED = 4096  # rows of head and embedding that are compared together
COPY = "Copy the model again from its source"


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a model. UserError if one of them is missing."""
    if not (folder / INDEX).is_file():
        names = [SINGLE]
    else:
        content = read_json(folder / INDEX)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(
            isinstance(name, str) for name in places.values()
        ):
            raise UserError(f"{folder / INDEX} is no index of safetensors files. {COPY}")
        names = sorted(set(places.values()))
    if strange := [name for name in names if Path(name).name != name or len(name) > LONGEST_NAME]:
        raise UserError(
            f"{folder / INDEX} names {reprlib.repr(strange[0])}, and files must lie in the model's folder and have "
            f"names of at most {LONGEST_NAME} characters. {COPY}"
        )
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files: {', '.join(missing[:3])}. {COPY}"
        )
    return [folder / name for name in names]


def folder_mark(folder: Path) -> str:
    """A mark of a published model, which tells another model from it in a moment: a SHA-256 over the names and sizes of
    its weight files, and over the first and last megabyte of each."""
    digest = hashlib.sha256()
    for path in _files(folder):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            digest.update(file.read(MARKED))
            file.seek(max(size - MARKED, 0))
            digest.update(file.read(MARKED))
    return digest.hexdigest()[:16]


class Weights:
    """The tensors of a model's files, mapped into memory, under the names that our model has for them."""

    def __init__(self, files: list[Path], stack: contextlib.ExitStack):
        """The files stay open until `stack` closes."""
        self._slices: dict[str, Any] = {}
        self.skipped: dict[str, int] = {}  # what of the model is left out -> how many tensors
        for path in files:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            except (SafetensorError, OSError, ValueError) as failure:
                raise UserError(
                    f"{path} is not a whole safetensors file ({failure}). {COPY}"
                ) from failure
            for name, piece in slices.items():
                self._add(name.replace("model.language_model.", "model.", 1), piece, path)

    def _add(self, name: str, piece: Any, path: Path) -> None:
        for start, what in SKIPPED.items():
            if name.removeprefix("model.").startswith(start):
                self.skipped[what] = self.skipped.get(what, 0) + 1
                return
        if name in self._slices:
            raise UserError(f"{path} holds {name}, which another file holds too. {COPY}")
        self._slices[name] = piece

    def check(self, model: Qwen, folder: Path) -> None:
        """UserError unless the files hold exactly the model's parameters, with their shapes."""
        # Some publishers write a tied embedding a second time, as the head.
        head = self._slices.pop(HEAD, None) if model.config.tied else None
        wanted = {
            name: list(parameter.shape)
            for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        given = {name: list(piece.get_shape()) for name, piece in self._slices.items()}
        wrong = [
            f"{name} is {given.get(name, 'missing')} in the files and {wanted.get(name, 'nowhere')} in the model"
            for name in sorted({*wanted, *given})
            if wanted.get(name) != given.get(name)
        ]
        if wrong:
            raise UserError(
                f"the weights in {folder} do not fit its config.json: {'; '.join(wrong[:3])}, {len(wrong)} in all. "
                f"{COPY}"
            )
        if head is not None and not self._equal(head, given[EMBEDDING]):
            raise UserError(
                f"{folder} has a {HEAD} that differs from {EMBEDDING}, but its config.json says with "
                "tie_word_embeddings that both are the same. If the head is a matrix of its own, set "
                f"tie_word_embeddings to false in config.json, else delete {HEAD} from the files"
            )

    def _equal(self, head: Any, shape: list[int]) -> bool:
        """Whether the tensor of a tied head is the embedding, which has this shape."""
        table = self._slices[EMBEDDING]
        return list(head.get_shape()) == shape and all(
            torch.equal(head[i : i + COMPARED].float(), table[i : i + COMPARED].float())
            for i in range(0, shape[0], COMPARED)
        )

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Some rows of a tensor; only they are read."""
        return self._slices[name][first : first + count]


@contextlib.contextmanager
def open_weights(folder: Path, model: Qwen) -> Iterator[Weights]:
    """The weights of a folder, checked against a model of any kind: on a device, sharded, or on meta."""
    with contextlib.ExitStack() as stack:
        weights = Weights(_files(folder), stack)
        weights.check(model, folder)
        yield weights


@torch.no_grad()
def load_weights(model: Qwen, folder: Path) -> None:
    """Fill a model, sharded or not, from a published folder; adapters stay as they are.

    Each rank reads the rows that it holds, one parameter at a time, and casts them to the parameter's own format, so
    the model never stands whole in a process that holds a part of it. UserError if files are missing or do not fit.
    """
    with open_weights(folder, model) as weights:
        for what, count in weights.skipped.items():
            log(f"model: {what} ({count} tensors) skipped; only the text model is loaded")
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                continue
            here = local(parameter)
            first = parallel.place_of(parameter).first_row(parameter.shape[0])
            if here.numel():  # the last ranks may hold no rows of a small parameter
                here.copy_(weights.rows(name, first, here.shape[0]))
            if here.dtype == torch.float16 and not here.isfinite().all():
                raise UserError(
                    f"{name} in {folder} has values that fp16 cannot hold. Set NANOCHAT_DTYPE=float32"
                )


def qwen_on_meta(
    folder: Path, compute: Compute, dtype: torch.dtype, sequence_len: int | None = None
) -> Qwen:
    """The model of a published folder without values, matrices and tables in `dtype`; its files are checked before any
    memory is taken."""
    model = on_meta(read_config(folder, sequence_len), compute)
    with open_weights(folder, model):
        pass
    held_in(model, dtype)
    return model


def load_qwen(
    folder: Path,
    compute: Compute,
    dtype: torch.dtype | None = None,
    sequence_len: int | None = None,
) -> Qwen:
    """The whole model of a published folder on this rank's device, in eval mode.

    `dtype` is the format of matrices and tables, by default the compute dtype; full fine-tuning asks for float32. To
    load a sharded model: qwen_on_meta(), parallel.shard(), to_empty(), load_weights().
    """
    model = qwen_on_meta(folder, compute, dtype or compute.dtype, sequence_len)
    model.to_empty(device=compute.device)
    load_weights(model, folder)
    return model.eval()
