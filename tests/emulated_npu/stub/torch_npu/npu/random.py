"""Random numbers of each device: they come from a CPU generator with the device's seed."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torch_npu import _load


def _generator(device: Any) -> torch.Generator:
    from torch_npu.npu.utils import _get_device_index

    return _load.device().generator(
        _get_device_index(torch.device(device) if isinstance(device, str) else device, True)
    )


def _all() -> list[torch.Generator]:
    return [_load.device().generator(i) for i in range(_load.device().device_count())]


def get_rng_state(device: Any = "npu") -> Tensor:
    """The state of a device's generator, as a CPU tensor of bytes."""
    return _generator(device).get_state()


def set_rng_state(new_state: Tensor, device: Any = "npu") -> None:
    """Set the state of a device's generator."""
    _generator(device).set_state(new_state.cpu())


def get_rng_state_all() -> list[Tensor]:
    """The states of all devices' generators."""
    return [generator.get_state() for generator in _all()]


def set_rng_state_all(new_states: Iterable[Tensor]) -> None:
    """Set the states of all devices' generators."""
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed all devices' generators."""
    for generator in _all():
        generator.manual_seed(int(seed))


def seed() -> None:
    """Give the current device's generator a random seed."""
    _generator(None).seed()


def seed_all() -> None:
    """Give all devices' generators the same random seed."""
    manual_seed_all(torch.Generator().seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _generator(None).initial_seed()
