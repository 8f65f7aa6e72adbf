"""The sampling defaults of generation_config.json."""

import json
import reprlib
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.generation import listed_ends, sampling_defaults
from nanochat.checkpoint_manager.load import load_model, load_published
from nanochat.common import UserError
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu, tiny_checkpoint

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": [302, 300]}


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        (QWEN3, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        ({"repetition_penalty": 1.05, "max_new_tokens": 2048}, {"repetition_penalty": 1.05}),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
        ({"top_k": 0, "min_p": None}, {"top_k": 0}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"eos_token_id": 300}, {}),
        (None, {}),
    ],
)
def test_what_the_publisher_states_is_returned(content: Any, defaults: dict[str, Any], tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert sampling_defaults(tmp_path) == defaults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("temperature", "warm"),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_k", float("inf")),
        ("top_k", float("nan")),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        ("repetition_penalty", 1e9),
    ],
)
def test_a_default_out_of_range_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(UserError, match=rf"{name}={reprlib.repr(value)}"):
        sampling_defaults(tmp_path)


@pytest.mark.parametrize("listed", [{"eos_token_id": None}, {"eos_token_id": []}, {}])
def test_the_ends_of_config_json_count_where_generation_config_json_lists_none(
    listed: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [302, 0]}))
    (tmp_path / "generation_config.json").write_text(json.dumps(listed))
    assert listed_ends(tmp_path) == [302, 0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert listed_ends(tmp_path) == [0]


@pytest.mark.parametrize("listed", ["x", 10**30, [302, "</s>"], {"id": 2}])
def test_what_is_no_token_cannot_end_a_reply(listed: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(UserError, match=r"eos_token_id=.*must be the number of a token"):
        listed_ends(tmp_path)


def test_only_published_models_have_them(tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3")
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN3))
    assert load_published(tmp_path, None, on_cpu()).tokenizer.sampling["top_k"] == 20
    tiny_checkpoint()
    assert load_model(None, None, None, on_cpu()).tokenizer.sampling == {}
