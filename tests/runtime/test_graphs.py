"""Which device replays the decoding steps of replies; the graphs themselves are tested in tests/platforms."""

from dataclasses import replace

import pytest

from nanochat.common import UserError
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.runtime import graphs
from tests.support.tiny_model import on_cpu, pretend


def test_one_gpu_replays_replies_unless_told_otherwise_and_others_where_asked() -> None:
    gpu, npu = pretend(Nvidia()), pretend(Ascend())
    assert graphs.for_replies(None, gpu) is gpu.platform
    assert graphs.for_replies(False, gpu) is None
    assert graphs.for_replies(None, replace(gpu, world_size=2)) is None
    assert graphs.for_replies(True, replace(gpu, world_size=2)) is gpu.platform
    assert graphs.for_replies(None, npu) is None and graphs.for_replies(None, on_cpu()) is None
    with pytest.raises(UserError, match="--graphs was asked for, but cannot be used: the device is a CPU"):
        graphs.for_replies(True, on_cpu())
