"""Reads generation_config.json: the publisher's sampling defaults, and the ends of a reply."""

import reprlib
from pathlib import Path

from nanochat.checkpoint_manager.huggingface.folders import read_object
from nanochat.common import UserError, tr, write_json

FILE_NAME = "generation_config.json"
MOST_TOKENS = 1 << 31  # of a vocabulary
# Name in the file and in Sampling -> the type, and the smallest and largest sensible value.
SETTINGS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0.0, 2.0),
    "top_p": (float, 1e-6, 1.0),
    "top_k": (int, 0, 1 << 31),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 1e-3, 1e3),
}


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the publisher's sampling defaults for the model in a folder, by the name in Sampling.

    The dict has only what generation_config.json states, so it is empty where the file is missing.
    `do_sample: false` gives a temperature of 0, and a top_k of 0 stands for all tokens. Raises
    UserError if a value is out of range.
    """
    path = folder / FILE_NAME
    content = read_object(path)
    defaults: dict[str, float] = {}
    for name, (kind, low, high) in SETTINGS.items():
        value = content.get(name)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or kind(value) != value:
            raise UserError(
                tr(
                    "{path} has {name}={value}, and it must be from {low:g} to {high:g}. "
                    "Correct it, or remove it from the file",
                    path=path,
                    name=name,
                    value=reprlib.repr(value),
                    low=low,
                    high=high,
                )
            )
        defaults[name] = kind(value)
    if content.get("do_sample") is False:
        defaults["temperature"] = 0.0
    return defaults


def listed_ends(folder: Path) -> list[int]:
    """Return the tokens that end generation, in the order of generation_config.json.

    If that file lists none, the tokens are those of config.json. Raises UserError if something that
    is not a token's number is listed.
    """
    for name in (FILE_NAME, "config.json"):
        path = folder / name
        listed = read_object(path).get("eos_token_id")
        tokens = listed if isinstance(listed, list) else [listed]
        ends = [token for token in tokens if token is not None]
        if not all(isinstance(token, int) and token < MOST_TOKENS for token in ends):
            raise UserError(
                tr(
                    "{path} has eos_token_id={value}, and it must be the number of a token, or a "
                    "list of such numbers. Correct it, or remove it from the file",
                    path=path,
                    value=reprlib.repr(listed),
                )
            )
        if ends:
            return ends
    return []


def add_end(folder: Path, token: int) -> None:
    """Add a token to those that end generation in a folder, unless its files list it already.

    Base models list the end of a document only. Once such a model is fine-tuned to chat, other
    programs would generate beyond the end of its replies.
    """
    listed = listed_ends(folder)
    if token not in listed:
        path = folder / FILE_NAME
        write_json(path, {**read_object(path), "eos_token_id": [token, *listed]})
