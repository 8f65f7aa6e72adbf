"""Tiny published models with adapters (LoRA) that change what they say."""

from pathlib import Path

import torch

from nanochat.checkpoint_manager.huggingface.adapter import save_adapter
from nanochat.models.lora import LoraConfig, adapted, add_adapters, init_adapters
from nanochat.models.qwen.model import Qwen
from tests.support.qwens import tiny_qwen, write_folder


def with_adapter(family: str, config: LoraConfig, seed: int = 7, scale: float = 0.1) -> Qwen:
    """A tiny model with an adapter whose second matrices have standard deviation `scale`."""
    model = tiny_qwen(family)
    add_adapters(model, config)
    init_adapters(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, adapter in adapted(model):
            adapter.second.weight.copy_(torch.randn(adapter.second.weight.shape, generator=generator) * scale)
    return model


def write_folder_with_adapter(folder: Path) -> Path:
    """A published Qwen3 in `folder`, and beside it, in the folder `mine`, an adapter that changes what it says."""
    folder.mkdir()
    write_folder(folder, "qwen3")
    config = LoraConfig(4)
    save_adapter(with_adapter("qwen3", config, scale=1.0), config, str(folder), folder.parent / "mine")
    return folder
