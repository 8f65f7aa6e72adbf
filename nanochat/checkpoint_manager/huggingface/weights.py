"""Loads a published model one parameter at a time; each rank reads only the rows that it holds."""

import contextlib
import hashlib
import reprlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanochat.checkpoint_manager.families import allocate, cast_matrices, on_meta
from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.expert_files import take_stacks
from nanochat.checkpoint_manager.huggingface.folders import refuse_pickle, refuse_pointer
from nanochat.checkpoint_manager.huggingface.quantised import (
    SCALE,
    dequantised_rows,
    scale_problem,
)
from nanochat.checkpoint_manager.parts.index import INDEX
from nanochat.common import UserError, log, read_json, tr
from nanochat.data.library_words import in_words
from nanochat.device import Compute, local
from nanochat.linear import matrix_shapes
from nanochat.models.nf4 import BITS, hold_in_nf4, nf4_matrices
from nanochat.models.qwen.config import QwenConfig
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.base import dtype_name
from nanochat.runtime import parallel

MARKED_BYTES = 1 << 20  # how much folder_mark() reads at each end of a file
MARKED_BLOCKS = 256  # how many blocks folder_mark() reads between the ends, and their bytes
BLOCK_BYTES = 4096
SINGLE = "model.safetensors"
PARTS = "model-*-of-*.safetensors"
# Prefix of tensors that are not loaded -> the part of the model that they belong to.
SKIPPED = ("visual.", "mtp.")
INVERSE_FREQUENCIES = ".rotary_emb.inv_freq"  # written by old versions, and computed here
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
MAX_NAME_LENGTH = 200  # characters in the name of a file
COMPARED_ROWS = 4096  # rows of head and embedding to compare at a time


def _copy_again() -> str:
    """Return the advice for damaged files, in the user's language."""
    return tr("Copy the model again from its source")


def _files(folder: Path) -> list[Path]:
    """Return the paths of a model's safetensors files.

    Raises UserError if a file is missing or outside the folder, or if the index is damaged.
    """
    names = [SINGLE]
    index = folder / INDEX
    if index.is_file():
        names = _indexed_files(index)
    elif not (folder / SINGLE).is_file():  # the index was not copied; check() misses no tensor
        names = sorted(path.name for path in folder.glob(PARTS)) or names
    for name in names:
        if Path(name).name != name or len(name) > MAX_NAME_LENGTH:
            raise UserError(
                tr(
                    "{index} names {name}, and files must lie in the model's folder and "
                    "have names of at most {max_name_length} characters. {copy}",
                    index=index,
                    name=reprlib.repr(name),
                    max_name_length=MAX_NAME_LENGTH,
                    copy=_copy_again(),
                )
            )
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        refuse_pickle(folder)
        raise UserError(
            tr(
                "{folder} lacks {missing_count} of {names_count} weight files: {missing}. {copy}",
                folder=folder,
                missing_count=len(missing),
                names_count=len(names),
                missing=", ".join(missing[:3]),
                copy=_copy_again(),
            )
        )
    return [folder / name for name in names]


def _indexed_files(index: Path) -> list[str]:
    """Return the sorted names of the files that an index lists.

    Raises UserError if the index is damaged.
    """
    content = read_json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if isinstance(weight_map, dict):
        names = list(weight_map.values())
        if all(isinstance(name, str) for name in names):
            return sorted({PurePosixPath(name).as_posix() for name in names})
    raise UserError(
        tr("{index} is not an index of safetensors files. {copy}", index=index, copy=_copy_again())
    )


def folder_mark(folder: Path) -> str:
    """Return a fingerprint of a published model's weights that takes only a moment to compute.

    The first 16 hex digits are of a SHA-256 over the name, the size, and the first and last MiB of
    each weight file, and the other 16 over 256 evenly spaced blocks of each file. Two models of one
    shape may differ only between the ends, such as models that got other adapters merged into their
    layers. A change of less than 1/256 of a file may still go unnoticed.

    Marks of earlier versions have the first 16 digits only; see is_marked().
    """
    ends = hashlib.sha256()
    blocks = hashlib.sha256()
    for path in _files(folder):
        size = path.stat().st_size
        ends.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            ends.update(file.read(MARKED_BYTES))
            file.seek(max(size - MARKED_BYTES, 0))
            ends.update(file.read(MARKED_BYTES))
            for number in range(MARKED_BLOCKS):
                file.seek(size * number // MARKED_BLOCKS)
                blocks.update(file.read(BLOCK_BYTES))
    return ends.hexdigest()[:16] + blocks.hexdigest()[:16]


def is_marked(folder: Path, mark: str) -> bool:
    """Return whether a folder has a mark that this or an earlier version saved."""
    return folder_mark(folder).startswith(mark)


class Weights:
    """The tensors in a published model's files, under our names and mapped into memory."""

    def __init__(self, files: list[Path], stack: contextlib.ExitStack):
        """Open the files, which stay open until `stack` closes.

        Raises UserError if a file is damaged, or if two files hold the same tensor.
        """
        self._slices: dict[str, Any] = {}
        self._scales: dict[str, Any] = {}  # the factors of FP8 matrices, by the matrices' names
        # Part of the model that is left out -> the number of its tensors.
        self.skipped: dict[str, int] = {}
        for path in files:
            refuse_pointer(path)
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                names = list(file.keys())
                slices = {name: file.get_slice(name) for name in names}
            except (SafetensorError, OSError, ValueError) as failure:
                raise UserError(
                    tr(
                        "{path} is not a whole safetensors file ({failure}). {copy}",
                        path=path,
                        failure=in_words(failure),
                        copy=_copy_again(),
                    )
                ) from failure
            for name, tensor_slice in slices.items():
                our_name = name.replace("model.language_model.", "model.", 1)
                self._add(our_name, tensor_slice, path)
        self._single = dict(self._slices)  # with the matrices of experts one by one
        self._slices |= take_stacks(self._slices, self._scales)

    def _add(self, name: str, tensor_slice: Any, path: Path) -> None:
        for prefix in SKIPPED:
            if name.removeprefix("model.").startswith(prefix):
                part = (
                    tr("the vision tower") if prefix == "visual." else tr("the multi-token heads")
                )
                self.skipped[part] = self.skipped.get(part, 0) + 1
                return
        if name.endswith(INVERSE_FREQUENCIES):
            return
        slices = self._slices
        if name.endswith(SCALE):
            slices = self._scales
            name = name.removesuffix(SCALE)
        if name in slices:
            raise UserError(
                tr(
                    "{path} holds {name}, which another file holds too. {copy}",
                    path=path,
                    name=name,
                    copy=_copy_again(),
                )
            )
        slices[name] = tensor_slice

    def check(self, model: Qwen, folder: Path) -> None:
        """Raise UserError unless the files match the model's parameters exactly, in name and shape.

        Adapters are left out of the comparison. The files may also hold a tied head, if it equals
        the embedding.
        """
        # Some publishers write a tied embedding a second time, as the head.
        head = self._slices.pop(HEAD, None) if model.config.tied else None
        expected = {
            name: list(parameter.shape)
            for name, parameter in model.named_parameters()
            if ".lora_" not in name
        }
        expected |= {name: list(shape) for name, shape in matrix_shapes(model).items()}
        shapes = {
            name: list(tensor_slice.get_shape()) for name, tensor_slice in self._slices.items()
        }
        wrong = []
        for name in sorted({*expected, *shapes}):
            if expected.get(name) != shapes.get(name):
                in_files = shapes.get(name, tr("missing"))
                in_model = expected.get(name, tr("nowhere"))
                wrong.append(
                    tr(
                        "{name} is {in_files} in the files and {in_model} in the model",
                        name=name,
                        in_files=in_files,
                        in_model=in_model,
                    )
                )
        if wrong:
            raise UserError(
                tr(
                    "the weights in {folder} do not fit its config.json: {wrong}, "
                    "{wrong_count} in all. {copy}",
                    folder=folder,
                    wrong="; ".join(wrong[:3]),
                    wrong_count=len(wrong),
                    copy=_copy_again(),
                )
            )
        for name, tensor_slice in self._single.items():
            problem = scale_problem(tensor_slice, self._scales.get(name))
            if problem:
                raise UserError(
                    tr(
                        "{name} in {folder} {problem}. {copy}",
                        name=name,
                        folder=folder,
                        problem=problem,
                        copy=_copy_again(),
                    )
                )
        lost = self._scales.keys() - self._single.keys()
        if lost:
            raise UserError(
                tr(
                    "{folder} has factors of {name} without it. {copy}",
                    folder=folder,
                    name=min(lost),
                    copy=_copy_again(),
                )
            )
        if head is not None and not self._is_embedding(head, shapes[EMBEDDING]):
            raise UserError(
                tr(
                    "{folder} has a {head} that differs from {embedding}, but its "
                    "config.json says with tie_word_embeddings that both are the same. If "
                    "the head is a matrix of its own, set tie_word_embeddings to false in "
                    "config.json, else delete {head} from the files",
                    folder=folder,
                    head=HEAD,
                    embedding=EMBEDDING,
                )
            )

    def _is_embedding(self, head: Any, shape: list[int]) -> bool:
        """Return whether the tied head `head` equals the embedding, which has shape `shape`."""
        if list(head.get_shape()) != shape:
            return False
        embedding = self._slices[EMBEDDING]
        for first in range(0, shape[0], COMPARED_ROWS):
            end = first + COMPARED_ROWS
            if not torch.equal(head[first:end].float(), embedding[first:end].float()):
                return False
        return True

    @property
    def fp8_count(self) -> int:
        """The number of matrices in FP8."""
        return len(self._scales)

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return `count` rows of a tensor, starting at row `first`. Only these are read.

        The rows of an FP8 matrix are returned in fp32, times their factors.
        """
        if name in self._scales:
            return dequantised_rows(self._slices[name], self._scales[name], first, count)
        return self._slices[name][first : first + count]


@contextlib.contextmanager
def open_weights(folder: Path, model: Qwen) -> Iterator[Weights]:
    """Yield the weights in a folder, after checking that they fit a model.

    The model may be on the meta device, and it may be sharded. Raises UserError if files are
    missing, damaged or do not fit the model.
    """
    with contextlib.ExitStack() as stack:
        weights = Weights(_files(folder), stack)
        weights.check(model, folder)
        yield weights


@torch.no_grad()
def load_weights(model: Qwen, folder: Path) -> None:
    """Load the weights in a published folder into a model, except for its adapters.

    The model may be sharded: each rank reads only the rows that it holds, one parameter at a time,
    and casts them to the parameter's own number format. The 4-bit matrices of hold_in_nf4() are
    quantised one at a time, and every rank holds all of them. Raises UserError if files are missing,
    damaged or do not fit the model, or if a parameter in fp16 or 4 bits is not finite after loading.
    """
    with open_weights(folder, model) as weights:
        for part_of_model, count in weights.skipped.items():
            log(
                tr(
                    "model: {part_of_model} ({count} tensors) skipped; only the text model "
                    "is loaded",
                    part_of_model=part_of_model,
                    count=count,
                )
            )
        if weights.fp8_count:
            log(
                tr(
                    "model: {count} matrices in FP8 are converted, and computed with in {dtype}",
                    count=weights.fp8_count,
                    dtype=dtype_name(model.dtype),
                )
            )
        for name, matrix in nf4_matrices(model).items():
            matrix.fill(partial(weights.rows, name))
            if not matrix.is_finite:
                raise UserError(
                    tr(
                        "{name} in {folder} has values that are NaN or infinite. {copy}",
                        name=name,
                        folder=folder,
                        copy=_copy_again(),
                    )
                )
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                continue
            local_rows = local(parameter)
            first = parallel.place_of(parameter).first_row(parameter.shape[0])
            if local_rows.numel():  # the last ranks may hold no rows of a small parameter
                local_rows.copy_(weights.rows(name, first, local_rows.shape[0]))
            if local_rows.dtype == torch.float16 and not local_rows.isfinite().all():
                raise UserError(
                    tr(
                        "{name} in {folder} has values that fp16 cannot hold. Set "
                        "NANOCHAT_DTYPE=float32",
                        name=name,
                        folder=folder,
                    )
                )


def check_bits(config: QwenConfig, bits: int, name: str) -> None:
    """Raise UserError (exit code 2) if `bits` is 4 and the model has experts."""
    if bits == BITS and config.has_experts:
        raise UserError(
            tr(
                "4 bits (--base_bits=4, --weights nf4) cannot hold the experts of {name}, where "
                "most of its weights are. Leave the flag out; finetune can share the model among "
                "devices with --shard=full",
                name=name,
            ),
            exit_code=2,
        )


def qwen_on_meta(
    folder: Path,
    compute: Compute,
    dtype: torch.dtype,
    sequence_len: int | None = None,
    bits: int = 16,
) -> Qwen:
    """Return a published model on the meta device, with matrices and tables in `dtype`.

    If `bits` is 4, the matrices in layers are in NF4, and are multiplied in the compute dtype.
    Raises UserError if files are missing, damaged or do not fit each other, or (exit code 2) if a
    model with experts is to be held in 4 bits.
    """
    config = read_config(folder, sequence_len)
    check_bits(config, bits, folder.name)
    model = on_meta(config, compute)
    with open_weights(folder, model):
        pass
    cast_matrices(model, dtype)
    if bits == BITS:
        hold_in_nf4(model, compute.dtype)
    return model


def load_qwen(
    folder: Path,
    compute: Compute,
    dtype: torch.dtype | None = None,
    sequence_len: int | None = None,
    bits: int = 16,
) -> Qwen:
    """Load a whole published model onto this rank's device, and return it in eval mode.

    `dtype` is the number format of matrices and tables, by default the compute dtype; full
    fine-tuning asks for float32. If `bits` is 4, the matrices in layers are in NF4. To load a
    sharded model, call qwen_on_meta(), parallel.shard(), to_empty() and load_weights() instead.
    """
    model = qwen_on_meta(folder, compute, dtype or compute.dtype, sequence_len, bits)
    allocate(model, compute.device)
    load_weights(model, folder)
    return model.eval()
