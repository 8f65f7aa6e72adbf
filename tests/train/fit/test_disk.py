"""What a run takes of the disk, against what saving and pruning really leave there."""

from pathlib import Path

import pytest
import torch

from nanochat.checkpoint_manager.files import prune, publish, step_dir
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.gpt import GPT, GPTConfig
from nanochat.optim import Optimizers, Rates
from nanochat.train.fit import disk
from nanochat.train.fit.disk import saved_bytes
from nanochat.train.flags import RunFlags
from tests.support.tiny_model import on_cpu, tiny_tokenizer


@pytest.mark.parametrize("rates", [Rates(), Rates(matrix_optimizer="adamw")], ids=["muon", "adamw"])
def test_a_checkpoint_takes_the_bytes_that_were_predicted(rates: Rates, tmp_path: Path) -> None:
    shape = GPTConfig(
        sequence_len=64, vocab_size=4096, n_layer=4, n_head=2, n_kv_head=2, n_embd=128,
        bigram_rows=8192, offset_layers=4,
    )  # fmt: skip
    model = GPT(shape)
    model.init_weights(1)
    optimizers = Optimizers(model, model.parameter_roles(), 128, rates, 1.0, torch.float32)
    save_checkpoint(tmp_path, 1, model, optimizers, tiny_tokenizer(), {}, on_cpu())
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    predicted = saved_bytes(model, rates)
    assert predicted < written < disk.BESIDE_TENSORS * predicted


def test_the_stages_of_a_speedrun_never_hold_more_checkpoints_than_predicted(tmp_path: Path) -> None:
    most = 0
    for stage in disk.SPEEDRUN:
        folder = tmp_path / stage
        for step in range(1, 8):
            temporary = folder / f".tmp-step_{step:06d}"
            temporary.mkdir(parents=True)
            (temporary / "meta.json").touch()
            most = max(most, len(list(tmp_path.glob("*/*"))))
            publish(temporary, step_dir(folder, step))
            prune(folder, RunFlags.keep, step)
    parts = disk.of_run(1 / disk.BESIDE_TENSORS, {}, 65_536, published_chats=False)
    assert sum(parts.values()) == pytest.approx(most) == 13


def test_a_larger_vocabulary_takes_four_bytes_for_each_token() -> None:
    small, large = (disk.of_run(0, {"web": 1e9}, size, False)["tokens web"] for size in (65_536, 65_537))
    assert large == 2 * small
