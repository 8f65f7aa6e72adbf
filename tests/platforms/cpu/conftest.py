"""What the tests of compiled kernels share."""

from collections.abc import Iterator

import pytest
import torch

from nanochat.common import base_dir
from nanochat.platforms import host
from nanochat.platforms.cpu.training import Training, training


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture
def made() -> Training:
    found = training(host.use_compile_cache(base_dir()))
    assert found is not None
    return found
