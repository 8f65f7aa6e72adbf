"""A finished model is mixed with the one that it started from, also where ranks share it."""

import pytest
import torch

from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.runtime import parallel
from nanochat.train.start_weights import StartWeights
from tests.support.ranks import run_ranks
from tests.support.tiny_model import on_cpu, tiny_gpt

VOCABULARY = 300


def mixed(compute: Compute, share: float, mode: parallel.Sharding = "full") -> dict[str, torch.Tensor]:
    """The weights after a change of every weight and the mix."""
    model = tiny_gpt(VOCABULARY)
    parallel.shard(model, model.shard_groups(), compute, mode)
    start = StartWeights(model, share)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(2).add_(number)
    start.mix()
    return {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_share_of_the_start_is_in_every_weight(share: float) -> None:
    before = tiny_gpt(VOCABULARY).state_dict()
    for number, (name, weight) in enumerate(mixed(on_cpu(), share).items()):
        ended = before[name] * 2 + number
        torch.testing.assert_close(weight, share * before[name] + (1 - share) * ended)


@pytest.mark.slow
def test_ranks_mix_their_own_rows() -> None:
    alone = mixed(on_cpu(), 0.5)
    for weights in run_ranks(2, mixed, 0.5):
        assert weights.keys() == alone.keys()
        assert all(torch.equal(weight, alone[name]) for name, weight in weights.items())


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_beyond_the_start_is_refused(share: float) -> None:
    with pytest.raises(UserError, match="at least 0 and below 1, got") as refusal:
        StartWeights(tiny_gpt(VOCABULARY), share)
    assert refusal.value.exit_code == 2
