"""The families of models: a checkpoint's meta.json names one, and this table maps its name to its classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.gpt import GPT, GPTConfig


@dataclass(frozen=True)
class Family:
    """The class of a family's models, and of the configuration that one is built from."""

    model: type[GPT]
    config: type[GPTConfig]


FAMILIES = {"gpt": Family(GPT, GPTConfig)}


def family_of(config: Any) -> str:
    """The name of the family whose configuration this is."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config)


def build(meta: Mapping[str, Any], compute: Compute) -> GPT:
    """A model of the family and shape that meta.json names, on the host, without weights yet.

    Checkpoints written before there were families name none and are of family gpt. UserError for an unknown family.
    """
    name = meta.get("family", "gpt")
    if name not in FAMILIES:
        raise UserError(
            f"the checkpoint holds a model of family {name!r}, and this version knows {', '.join(FAMILIES)}. Update "
            "nanochat to the version that wrote the checkpoint."
        )
    family = FAMILIES[name]
    return family.model(family.config(**meta["model"]), dtype=compute.dtype, operations=compute.operations)
