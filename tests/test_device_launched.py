"""A process finds its place in a job by the launcher's variables, and refuses a set that is incomplete or wrong."""

from typing import Any

import pytest

from nanochat import device
from nanochat.common import UserError
from nanochat.device import compute_init

# What torchrun sets for one of two ranks.
WHOLE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def without(name: str) -> dict[str, str]:
    return {key: value for key, value in WHOLE.items() if key != name}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The process groups that were asked for; no variable of a launcher is set."""
    calls: list[Any] = []
    for name in (*WHOLE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_join", calls.append)
    return calls


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK", "LOCAL_RANK", "unset WORLD_SIZE")),
        ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE")),
        ({"LOCAL_RANK": "1"}, ("LOCAL_RANK=1", "WORLD_SIZE")),
        *((without(name), (name,)) for name in WHOLE),
        ({**WHOLE, "RANK": "two"}, ("RANK", "'two'")),
        ({**WHOLE, "RANK": "2"}, ("RANK", "from 0 to 1", "'2'")),
        ({**WHOLE, "LOCAL_WORLD_SIZE": "1"}, ("LOCAL_RANK", "from 0 to 0", "'1'")),
        ({**WHOLE, "LOCAL_WORLD_SIZE": "all"}, ("LOCAL_WORLD_SIZE", "'all'")),
        ({**WHOLE, "WORLD_SIZE": "0"}, ("WORLD_SIZE", "'0'")),
        ({**WHOLE, "MASTER_PORT": "70000"}, ("MASTER_PORT", "'70000'")),
    ],
)
def test_variables_of_a_launcher_must_be_complete_and_in_range(
    environment: dict[str, str], named: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, joined: list[Any]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as refused:
        compute_init("cpu")
    assert refused.value.exit_code == 2 and not joined
    for word in named:
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "place", "joins"),
    [
        ({"RANK": "", "LOCAL_RANK": "", "WORLD_SIZE": ""}, (0, 0, 1), 0),
        ({"WORLD_SIZE": "1"}, (0, 0, 1), 0),
        ({**WHOLE, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": ""}, (0, 0, 1), 1),  # a pod with one process
        ({**WHOLE, "LOCAL_WORLD_SIZE": "2"}, (1, 1, 2), 1),
        (WHOLE, (1, 1, 2), 1),
    ],
)
def test_a_process_takes_its_place_in_the_job(
    environment: dict[str, str], place: tuple[int, int, int], joins: int, monkeypatch: pytest.MonkeyPatch,
    joined: list[Any],
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    compute = compute_init("cpu")
    assert (compute.rank, compute.local_rank, compute.world_size) == place and len(joined) == joins
