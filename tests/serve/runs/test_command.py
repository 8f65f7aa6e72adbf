"""The command of a run: a form gives back every flag, and a checkpoint the flags that resume it."""

import importlib
import json
from typing import Any

import pytest

from nanochat.checkpoint_manager.locate import MADE_BY
from nanochat.data.command_line import parse, settings
from nanochat.serve.runs import script
from nanochat.serve.runs.command import FORECAST, arguments, command, form_fields, saved_values, shown
from nanochat.serve.runs.script import fields_of, kind_of

FLAGS = {
    "base": ["--depth=3", "--compile=False", "--stop_at=5", "--model_tag=old"],
    "mid": ["--num_epochs=2.5", "--conversations=a b.jsonl", "--out_tag=old"],
    "sft": ["--num_iterations=7", "--samples=2", "--out_tag=old"],
    "rl": ["--num_samples=4", "--temperature=0.7", "--out_tag=old"],
    "tune": ["--model=/m", "--data", "a", "b c", "--lora_targets", "q_proj", "--other_code", "--seed=7", "--out=old"],
}  # fmt: skip


@pytest.mark.parametrize("stage", MADE_BY)
def test_a_checkpoint_of_every_stage_gives_the_flags_that_resume_it(stage):
    config = importlib.import_module(MADE_BY[stage]).Config
    begun = parse(config, FLAGS[stage])
    fields = json.loads(json.dumps(fields_of(config)))
    saved = {**settings(begun), "parent": "sft d4 step 9 0a1b", "corpus": "tinyworld"}
    words = arguments(fields, saved_values(fields, stage, "old", saved))
    again = settings(parse(config, words))
    once = {"stop_at": None, "other_code": False}
    parent = {"model_tag": "d4"} if stage in ("mid", "sft", "rl") else {}
    expected = {**settings(begun), **parent}
    assert again == {**expected, **{name: value for name, value in once.items() if name in expected}}


def test_every_flag_has_a_field_with_help_in_both_languages():
    config = importlib.import_module("scripts.finetune").Config
    fields = {field["name"]: field for field in fields_of(config)}
    assert fields["data"]["required"] and fields["data"]["kind"] == script.LIST
    assert fields["seed"]["rare"] and not fields["lora_rank"]["rare"]
    assert fields["shard"]["choices"] == ["none", "grad", "full"] and fields["shard"]["default"] == "grad"
    for field in fields.values():
        assert field["help"]["en"] and field["help"]["zh"] != field["help"]["en"], field["name"]
    names = [field["name"] for field in form_fields([*fields.values()], resumes=False)]
    assert set(names) == set(fields) - {FORECAST}


def test_several_processes_share_a_launcher():
    argv = command("scripts.finetune", ["--data", "a b"], 4)
    assert argv[1:] == [
        "-m",
        "nanochat.runtime.launch",
        "--nproc_per_node=4",
        "-m",
        "scripts.finetune",
        "--",
        "--data",
        "a b",
    ]
    assert shown(argv) == ("python -m nanochat.runtime.launch --nproc_per_node=4 -m scripts.finetune -- --data 'a b'")


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [(bool, script.SWITCH), (bool | None, script.CHOICE), (tuple[str, ...], script.LIST), (int | None, script.TEXT)],
)
def test_kinds_of_fields(annotation: Any, kind: str) -> None:
    assert kind_of(annotation)[0] == kind
