"""The shapes of models that checkpoints describe."""

import pytest

from nanochat.checkpoint_manager.families import checked_shape
from nanochat.common import UserError
from nanochat.gpt import GPTConfig


@pytest.mark.parametrize(("key_offset", "layers"), [(0, 0), (1, 3)])
def test_an_offset_of_all_layers_or_none_is_read(key_offset: int, layers: int) -> None:
    """Checkpoints of 2026-11-24 say so instead of how many layers have one."""
    config = checked_shape(GPTConfig, {"n_layer": 3, "key_offset": key_offset}, "meta.json")
    assert config == GPTConfig(n_layer=3, offset_layers=layers)


@pytest.mark.parametrize("n_layer", [None, "3", 0])
def test_an_offset_of_layers_that_cannot_be_is_refused(n_layer: object) -> None:
    with pytest.raises(UserError, match=r"^meta.json describes no model that this version can build: n_layer is "):
        checked_shape(GPTConfig, {"n_layer": n_layer, "key_offset": 1}, "meta.json")
