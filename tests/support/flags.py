"""Builds configurations from flags by name, as a command line gives them."""

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints


def configured(config: type[Any], **flags: Any) -> Any:
    """The configuration with these values; TypeError for a flag that it does not have."""
    built = _build(config, None, flags)
    if flags:
        raise TypeError(f"{config.__qualname__} has no flag {', '.join(flags)}")
    return built


def _build(config: type[Any], default: Any, flags: dict[str, Any]) -> Any:
    hints = get_type_hints(config, include_extras=True)
    given: dict[str, Any] = {}
    for field in fields(config):
        kind = hints[field.name]
        kind = get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
        if is_dataclass(kind):
            start = field.default if default is None else getattr(default, field.name)
            given[field.name] = _build(kind, start, flags)  # type: ignore[arg-type]
        elif field.name in flags:
            given[field.name] = flags.pop(field.name)
        elif default not in (None, MISSING):
            given[field.name] = getattr(default, field.name)
    return config(**given)
