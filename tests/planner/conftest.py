"""Forecasts without a process of their own."""

from collections.abc import Callable

import pytest
import torch

from nanochat.device import compute_init
from nanochat.planner import forecast
from nanochat.planner.forecast import Ledger, Memory, Tuning, count_all_layers


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tuning], Memory]:
    """What forecast() says, without a process of its own, which would take seconds to import torch."""
    monkeypatch.setattr(torch.UntypedStorage, "resize_", torch.UntypedStorage.resize_)  # restores it
    ledger = Ledger()
    forecast._watch_resizing(ledger)

    def count(tuning: Tuning) -> Memory:
        try:
            return count_all_layers(tuning, compute_init("cpu"), ledger)
        finally:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()

    return count
