"""What RL begins with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.load import load_model
from nanochat.common import UserError
from nanochat.models.lora import merge
from nanochat.rl.start import open_tuned
from scripts import finetune
from tests.support.flags import configured
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu


def tuned_adapter(folder: Path, family: str, **flags: Any) -> None:
    """Fine-tune an adapter of rank 4 on a random model, which is written to the folder."""
    write_folder(folder, family)
    chats = [json.dumps({"prompt": f"Say {i}.", "response": f"{i} cats"}) for i in range(20)]
    (folder / "chats.jsonl").write_text("\n".join(chats))
    finetune.train(configured(
        finetune.Config, model=folder, data=(str(folder / "chats.jsonl"),), lora_rank=4, max_length=64,
        num_iterations=2, learning_rate=1e-2, replay_every=0, compile=False, **flags,
    ), on_cpu())  # fmt: skip


def test_rl_says_that_an_adapter_was_trained_on_4_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuned_adapter(tmp_path, "qwen3", base_bits=4)
    open_tuned(None, None, None, 16.0, on_cpu(), 1)
    assert "was trained on its base in 4 bits, and runs here on the base as it was published" in capsys.readouterr().out


def test_a_tuned_adapter_of_experts_is_merged_where_every_parameter_is_trained(tmp_path: Path) -> None:
    tuned_adapter(tmp_path, "qwen3.5-moe")
    start = open_tuned(None, None, 0, 16.0, on_cpu(), 1)
    assert start.fill is not None
    start.fill()
    model, _ = start.load()
    tuned = load_model("tune", None, None, on_cpu()).model
    merge(tuned)
    for name, parameter in tuned.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, msg=name)
    for rank, alpha, flag in ((8, 16.0, "--lora_rank=8"), (None, 32.0, "--lora_alpha=32")):
        with pytest.raises(UserError, match=f"of rank 4 and alpha 16, .* got {flag}: leave"):
            open_tuned(None, None, rank, alpha, on_cpu(), 1)
