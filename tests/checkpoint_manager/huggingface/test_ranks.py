"""Published models over several ranks: each reads its own rows, and sharded gradients are those of one process."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanochat.checkpoint_manager.huggingface.config import read_config
from nanochat.checkpoint_manager.huggingface.weights import load_weights
from nanochat.device import Compute, local
from nanochat.models.qwen.model import Qwen
from nanochat.platforms.layers import accelerate
from nanochat.runtime import parallel
from tests.checkpoint_manager.huggingface.test_weights import folder_of
from tests.support.qwens import tiny_qwen
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
Values = dict[str, Tensor]


def pass_of(model: torch.nn.Module) -> None:
    idx = torch.arange(40).view(2, 20)
    parallel.sync_gradients(model, last=True)
    model(idx[:, :-1], idx[:, 1:]).backward()


def load_and_train(
    compute: Compute, folders: list[Path], mode: parallel.Sharding
) -> list[tuple[Values, Values, float]]:
    """Of each folder: whole parameters, whole gradients, and the share of the values that this rank held."""
    found = []
    for folder in folders:
        with torch.device("meta"):
            model = Qwen(read_config(folder), compute.dtype)
            accelerate(model, compute.operations)
        parallel.shard(model, model.shard_groups(), compute, mode)
        model.to_empty(device=compute.device)
        load_weights(model, folder)
        held = sum(local(p).numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
        values = {name: value.clone() for name, value in parallel.whole_parameters(model)}
        pass_of(model)
        whole = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
        found.append((values, whole, held))
    return found


@pytest.mark.parametrize("mode", ["grad", "full"])
def test_each_rank_reads_its_rows_and_the_gradients_are_whole(mode: parallel.Sharding, tmp_path: Path) -> None:
    """The embedding of the tied model is used twice in a pass, as table and as head."""
    models = [tiny_qwen("qwen3"), tiny_qwen("qwen3.5")]
    folders = [folder_of(model, tmp_path / str(number)) for number, model in enumerate(models)]
    ranks = run_ranks(2, load_and_train, folders, mode)
    for number, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.bfloat16())
        pass_of(model)
        for rank in ranks:
            values, gradients, held = rank[number]
            assert held < 0.55
            for name, parameter in model.named_parameters():
                assert torch.equal(values[name], parameter), name
                torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)
