"""Finds the folder of a published model or adapter, also in the caches of hf and modelscope."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, tr

MODEL, ADAPTER = "config.json", "adapter_config.json"  # the files by which folders are known
# The files that a published model may have besides its weights.
COMPANIONS = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME
HUB_FOLDER = "models--"  # begins models--OWNER--NAME, the folder of a model in the cache of hf
POINTER = b"version https://git-lfs.github.com/spec/"  # begins a file that git-lfs has not fetched
UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt")  # weights in pickle, which can run code


def published_folder(path: Path, marker: str = MODEL) -> Path:
    """Return the folder of the published model that a flag names, as an absolute path.

    `path` is the folder itself, a folder models--OWNER--NAME of the Hugging Face cache, or
    OWNER/NAME, which is looked up in the local caches of Hugging Face and ModelScope. `marker` is
    the file by which the folder is known. If the caches have only the other kind of folder under
    that name, an adapter's is refused as a model, and a model's is returned, for the reader of
    adapters to refuse. Raises UserError (exit code 2) if OWNER/NAME is in neither cache, or if the
    folder of a model is that of an adapter.
    """
    folder = path.expanduser()
    is_cached = HUB_NAME.fullmatch(str(path)) is not None and not folder.exists()
    candidates = list(_cached(*str(path).split("/"))) if is_cached else [folder]
    snapshot = _first_with(candidates, marker)
    if snapshot is None:
        snapshot = _first_with(candidates, ADAPTER if marker == MODEL else MODEL)
        if snapshot is not None and marker == MODEL:
            raise UserError(
                tr(
                    "{folder} is an adapter: name it with --adapter, and its base with --model",
                    folder=snapshot,
                ),
                exit_code=2,
            )
    if snapshot is None and is_cached:
        raise _not_cached(path)
    return snapshot or folder.resolve()


def _first_with(candidates: Iterable[Path], marker: str) -> Path | None:
    """Return the first folder with a file of that name, or None. A repository gives its snapshot."""
    snapshots = (_snapshot(candidate.resolve(), marker) for candidate in candidates)
    return next((snapshot for snapshot in snapshots if (snapshot / marker).is_file()), None)


def _not_cached(path: Path) -> UserError:
    """Return the error (exit code 2) that no cache has the model OWNER/NAME, with its download."""
    return UserError(
        tr(
            "there is no folder {path}, and neither {hub_cache} nor {modelscope_cache} holds "
            "that model. Download it with `hf download {path} --local-dir {name}` or, in China, "
            "`modelscope download --model {path} --local_dir {name}`, and name the folder {name}",
            path=path,
            hub_cache=_hub_cache(),
            modelscope_cache=_modelscope_cache(),
            name=path.name,
        ),
        exit_code=2,
    )


def _snapshot(folder: Path, marker: str) -> Path:
    """Return the snapshot in a folder models--OWNER--NAME, or `folder` itself if it is another.

    The snapshot is that of the branch main, or the newest one if main has none.
    """
    snapshots = folder / "snapshots"
    if not folder.name.startswith(HUB_FOLDER) or not snapshots.is_dir():
        return folder
    complete = [path.parent for path in snapshots.glob(f"*/{marker}")]
    main = folder / "refs" / "main"
    if main.is_file():
        commit = main.read_text(encoding="utf-8", errors="replace").strip()
        if snapshots / commit in complete:
            return snapshots / commit
    return max(complete, key=lambda path: path.stat().st_mtime, default=folder)


def _hub_cache() -> Path:
    """Return the folder of the Hugging Face cache, as its library finds it."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _modelscope_cache() -> Path:
    """Return the folder of ModelScope's cache, as its library finds it."""
    return Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope").expanduser()


def _cached(owner: str, name: str) -> Iterator[Path]:
    """Yield the folders in which the caches keep a model."""
    yield _hub_cache() / f"{HUB_FOLDER}{owner}--{name}"
    # ModelScope writes Qwen2.5 as Qwen2___5, and its versions use different folders.
    for folder in ("hub/models", "models", "hub", ""):
        yield _modelscope_cache() / folder / owner / name.replace(".", "___")
        yield _modelscope_cache() / folder / owner / name


def model_name(folder: Path) -> str:
    """Return the name of a published model or adapter by its folder.

    It is OWNER/NAME for a snapshot in the Hugging Face cache, whose own name is a hash, and else
    the name of the folder.
    """
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(HUB_FOLDER):
        return repository.removeprefix(HUB_FOLDER).replace("--", "/", 1)
    return folder.name.replace("___", ".")


def refuse_pointer(path: Path) -> None:
    """Raise UserError if a file is a pointer of git-lfs instead of the content."""
    try:
        with open(path, "rb") as file:
            is_pointer = file.read(len(POINTER)) == POINTER
    except OSError:  # whoever reads the file will say what is wrong
        return
    if is_pointer:
        raise UserError(
            tr(
                "{path} is only a pointer: the repository was cloned without its large files. Run "
                "`git lfs pull` in {folder}, or download the model again",
                path=path,
                folder=path.parent,
            ),
            exit_code=2,
        )


def refuse_pickle(folder: Path) -> None:
    """Raise UserError (exit code 2) if a folder has weights only in pickle."""
    pickles = sorted(path.name for pattern in UNREAD for path in folder.glob(pattern))
    if not pickles or any(folder.glob("*.safetensors")):
        return
    raise UserError(
        tr(
            "{folder} has its weights in {pickle} and no safetensors files, and files in "
            "pickle can run code, so none is loaded. Use the publisher's safetensors files, or "
            "convert the folder where you trust it: `{command}`",
            folder=folder,
            pickle=pickles[0],
            command=_conversion(folder, pickles[0]),
        ),
        exit_code=2,
    )


def _conversion(folder: Path, pickle: str) -> str:
    """Return a shell command that writes the weights in pickle as safetensors files."""
    if pickle.startswith("adapter_model"):
        source = str(folder / pickle)
        target = str(folder / "adapter_model.safetensors")
        code = (
            "import torch; from safetensors.torch import save_file; "
            f"save_file(torch.load({source!r}, weights_only=True), {target!r})"
        )
    else:
        code = (
            "from transformers import AutoModelForCausalLM as Model; "
            f"Model.from_pretrained({str(folder)!r}, dtype='auto').save_pretrained({str(folder)!r})"
        )
    return f"python -c {shlex.quote(code)}"


def read_object(path: Path) -> Mapping[str, Any]:
    """Return the content of a JSON file, or {} if the file is missing.

    Raises UserError if the content is not a JSON object.
    """
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(
            tr(
                "{path} is damaged: it is not an object. Copy the model again from its source",
                path=path,
            )
        )
    return content
