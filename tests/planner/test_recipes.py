"""The table of what can be fine-tuned on how many cards: its memory, its hours, and what it refuses."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.common import UserError
from nanochat.models.lora import LoraConfig
from nanochat.models.qwen.config import QwenConfig
from nanochat.planner import __main__ as command
from nanochat.planner import recipes, tuning_speed
from nanochat.planner.cards import rates_of
from nanochat.planner.forecast import Memory, Tuning
from nanochat.planner.programs import COMPILED
from nanochat.planner.published_tuning import SPEEDS
from nanochat.planner.recipes import CARDS, MODELS, Planner, default_tunings, key_of, settings, short_flags
from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.train.fit.memory import SHARE
from tests.planner.support import SLOW

CHIPS = {chip.name: chip for chip in ascend_chips.CHIPS}
ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = QwenConfig(
    sequence_len=1024, vocab_size=512, n_layer=2, n_embd=64, n_head=2, n_kv_head=1, head_dim=32, n_hidden=128
)


@pytest.fixture(autouse=True)
def no_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts take seconds: the default table must not need one."""

    def refuse(tuning: Tuning) -> Memory:
        raise AssertionError(f"{tuning} was forecast")

    monkeypatch.setattr(recipes, "announced_forecast", refuse)


def rows_of(capsys: pytest.CaptureFixture[str], **flags: object) -> list[list[str]]:
    command.main(command.Config(finetune=True, **flags))  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]


# --- the memory ----------------------------------------------------------------------------------


def test_the_shipped_forecasts_are_of_the_current_shapes_and_settings() -> None:
    assert recipes.read().keys() == default_tunings().keys(), "python -m nanochat.planner --write_recipes"


def test_forecasts_of_other_shapes_are_not_used(tmp_path: Path) -> None:
    content = json.loads(recipes.PATH.read_text(encoding="utf-8"))
    content["shapes"]["Qwen3-4B"]["n_layer"] += 1
    path = tmp_path / "recipes.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert recipes.read(path) == {}


@pytest.mark.slow
def test_shipped_forecasts_are_what_a_forecast_gives_today(told: Callable[[Tuning], Memory]) -> None:
    shape = MODELS["Qwen3-0.6B"]
    adapter = Tuning(shape, LoraConfig(), several_passes=True)
    sharded = Tuning(shape, None, several_passes=True, ranks=8, shard="full", checkpoint_activations=True,
                     offload_activations=True)  # fmt: skip
    shipped = recipes.read()
    for tuning in (adapter, sharded):
        expected = shipped[key_of("Qwen3-0.6B", tuning)]
        assert asdict(told(tuning)) == pytest.approx(asdict(expected), rel=1e-6)


def test_write_recipes_replaces_the_file_beside_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipes.json"
    monkeypatch.setattr(recipes, "PATH", path)
    monkeypatch.setattr(recipes, "forecasts", lambda tunings: [Memory(1, 2 + tuning.ranks) for tuning in tunings])
    command.main(command.Config(write_recipes=True))
    expected = {key: Memory(1, 2 + tuning.ranks) for key, tuning in default_tunings().items()}
    assert recipes.read(path) == expected and len(expected) > 100


# --- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["910A", "910B3", "910B4", "A100"])
def test_every_row_has_the_shortest_flags_that_fit(name: str) -> None:
    chip = next(chip for chip in command.device.planned() if chip.name == name)
    shipped = recipes.read()
    planner = Planner(chip, rates_of(chip), 10**7, lambda model, tuning: shipped[key_of(model, tuning)])
    for model, shape in MODELS.items():
        for lora in (LoraConfig(), None):
            for ranks in CARDS:
                recipe = planner.recipe(model, shape, lora, ranks)
                budget = SHARE * chip.memory_gib * 2**30
                fits = [
                    tuning for tuning in settings(shape, lora, ranks) if shipped[key_of(model, tuning)].peak <= budget
                ]
                assert (recipe.tuning if recipe else None) == next(iter(fits), None)
                if recipe and recipe.hours and recipe.preference_hours:
                    assert recipe.hours < recipe.preference_hours < 2 * recipe.hours


def test_the_default_table_has_a_row_for_every_model_and_number_of_cards(capsys: pytest.CaptureFixture[str]) -> None:
    head, _, *rows = rows_of(capsys, chip="910B3")
    assert [row[:2] for row in rows] == [[model, str(ranks)] for model in MODELS for ranks in CARDS]
    assert all(len(row) == len(head) for row in rows)
    table = {(row[0], row[1]): row for row in rows}
    assert table["Qwen3-0.6B", "1"][2] == "none"
    assert table["Qwen3-32B", "1"][2:6] == ["does not fit; 2 cards do", "-", "-", "-"]
    assert "--shard=full" in table["Qwen3-32B", "2"][2]


def test_bases_in_4_bits_have_a_row_for_every_model_and_small_card(capsys: pytest.CaptureFixture[str]) -> None:
    head, _, *rows = rows_of(capsys, chip="910B4", base_bits=4)
    assert [row[:2] for row in rows] == [[model, f"{gib} GiB"] for model in MODELS for gib in (16, 32)]
    table = {(row[0], row[1]): row for row in rows}
    for model, memory in (("Qwen2.5-7B", "16 GiB"), ("Qwen3-32B", "32 GiB")):
        row = table[model, memory]
        assert "--base_bits=4" in row[2] and float(row[3]) < SHARE * int(memory.split()[0]) and len(row) == len(head)
    assert table["Qwen3-32B", "16 GiB"][3:] == ["-", "-", "-"]
    with pytest.raises(UserError, match="plans one card of 16 and one of 32 GiB, got --ranks=8"):
        rows_of(capsys, chip="910B4", base_bits=4, ranks=8)


def test_cards_and_tokens_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    few = {row[0]: row for row in rows_of(capsys, chip="910B3", ranks=8)[2:]}
    many = {row[0]: row for row in rows_of(capsys, chip="910B3", ranks=8, tokens=100 * recipes.TOKENS)[2:]}
    assert list(few) == list(MODELS)
    minutes, unit = few["Qwen3-14B"][4].split()
    hours, long_unit = many["Qwen3-14B"][4].split()
    assert (unit, long_unit) == ("min", "h") and abs(float(hours) / float(minutes) - 100 / 60) < 0.1


@pytest.mark.parametrize(
    ("hours", "words"), [(None, "-"), (0.0098, "0.59 min"), (0.31, "19 min"), (1.04, "1 h"), (123.4, "123 h")]
)
def test_times_have_two_significant_digits(hours: float | None, words: str) -> None:
    assert recipes.rounded(hours) == words


def test_the_table_of_a_folder_forecasts_that_model_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--me--mine" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(published(replace(SHAPE, sequence_len=4096))))
    lengths = set()

    def memory(tuning: Tuning) -> Memory:
        lengths.add(tuning.shape.sequence_len)
        return Memory(10**9, 2 * 10**9)

    monkeypatch.setattr(recipes, "announced_forecast", memory)
    for model in (folder, Path("me/mine")):
        rows = rows_of(capsys, chip="910B3", model=model, ranks=1)[2:]
        assert [row[:4] for row in rows] == [["me/mine", "1", "none", "1.9"]] and lengths == {2048}


def test_a_chip_without_a_known_peak_has_memory_but_no_hours() -> None:
    chip = CHIPS["910B3"]
    planner = Planner(chip, None, 10**7, lambda model, tuning: Memory(1, 2))
    recipe = planner.recipe("Qwen3-4B", MODELS["Qwen3-4B"], LoraConfig(), 1)
    assert recipe and recipes.cells(recipe, "")[2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"shard": "full"}, "--shard"),
        ({"device_batch_size": 2}, "--device_batch_size"),
        ({"checkpoint_activations": True}, "--checkpoint_activations"),
        ({"offload_activations": True}, "--offload_activations"),
        ({"lora_rank": 0}, "--lora_rank"),
        ({"tokens": 0}, "--tokens"),
        ({"max_length": 0}, "--max_length"),
        ({"chip": "310P"}, "310P"),
    ],
)
def test_what_the_table_cannot_use_is_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        command.main(command.Config(finetune=True, **{"chip": "910B3", **flags}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "language"), [("docs/recipes.md", "en"), ("docs/zh/recipes.md", "zh")])
def test_the_documents_show_the_tables_as_they_are(
    name: str, language: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", language)
    text = (ROOT / name).read_text(encoding="utf-8")
    for chip in ("910B3", "910B4"):
        for row in rows_of(capsys, chip=chip):
            assert " | ".join(row) in text, (chip, row)
    for row in rows_of(capsys, chip="910B4", base_bits=4):
        assert " | ".join(row) in text, row


# --- the hours -----------------------------------------------------------------------------------


def test_flops_follow_from_the_shape() -> None:
    adapter = Tuning(SHAPE, LoraConfig())
    full = Tuning(SHAPE, None)
    assert asdict(tuning_speed.counts_of(SHAPE, LoraConfig())) == {
        "matrices": 2 * 36_864,  # q and o 64 x 64, k and v 64 x 32, three of 64 x 128
        "head": 512 * 64,
        "trained": 2 * 8 * 1024,
        "total": 2 * 36_864 + 512 * 64 + 2 * (2 * 64 + 2 * 32) + 64,  # and norms, two of them of heads
        "active": 2 * 36_864,
        "active_trained": 2 * 8 * 1024,
    }
    again = {"checkpoint_activations": True}
    assert tuning_speed.matmul_flops(adapter) == 4 * 73_728 + 4 * 32_768 + 6 * 16_384
    assert tuning_speed.matmul_flops(replace(adapter, **again)) == 6 * 73_728 + 4 * 32_768 + 8 * 16_384
    assert tuning_speed.matmul_flops(full) == 6 * (73_728 + 32_768)
    assert tuning_speed.matmul_flops(replace(full, **again)) == 8 * 73_728 + 6 * 32_768
    assert tuning_speed.attention_flops(adapter) == 7 * 2 * 64 * 2 * 512
    assert tuning_speed.attention_flops(replace(adapter, **again)) == 9 * 2 * 64 * 2 * 512


def test_the_slower_of_host_and_card_decides() -> None:
    full = Tuning(SHAPE, None)
    program = tuning_speed.program_for(full, "910B3")
    operators = program.layer_operators * 2 + program.pass_operators
    limited_by_host = tuning_speed.step_of(full, 4, SLOW, program)
    assert limited_by_host.one_pass == pytest.approx(operators * SLOW.launch)
    assert (limited_by_host.passes, limited_by_host.tokens) == (4, 4 * 1024)
    card = tuning_speed.step_of(full, 4, replace(SLOW, launch=0.0), program)
    traffic = program.traffic
    moved = 1024 * ((traffic.stream * 2 + traffic.ends) * 64 + traffic.logits * 512) + traffic.matrix * 106_496
    expected = 1024 * (638_976 / 1e12 + 917_504 / 0.5e12) + moved / 1e9
    assert card.one_pass == pytest.approx(expected)


def test_several_cards_exchange_what_they_train_and_gather_what_is_sharded() -> None:
    full = Tuning(SHAPE, None, ranks=4)
    program = replace(tuning_speed.program_for(full, "910B3"), step_operators=0)
    counts = tuning_speed.counts_of(SHAPE, None)
    split = tuning_speed.step_of(full, 8, SLOW, program)
    sharded = tuning_speed.step_of(replace(full, shard="full"), 8, SLOW, program)
    assert split.gather == 0 and sharded.gather == pytest.approx(4 * counts.total * 0.75 / 1e9)
    assert split.update == pytest.approx(28 * counts.trained / 4 / 1e9 + 6 * counts.trained * 0.75 / 1e9)
    assert sharded.hours(10**9, preferences=True) > sharded.hours(10**9) > split.hours(10**9)
    servers = tuning_speed.step_of(replace(full, ranks=16), 2, SLOW, program)
    assert servers.update > 8 * counts.trained / 8 / 2 / SLOW.network


def test_other_kernels_move_and_launch_more() -> None:
    adapter = Tuning(SHAPE, LoraConfig())
    fused, chunked = (tuning_speed.program_for(adapter, chip) for chip in ("910B3", "910A"))
    assert chunked.traffic.stream > fused.traffic.stream and chunked.layer_operators > fused.layer_operators
    assert tuning_speed.program_for(adapter, "H100") is COMPILED


def test_passes_grow_until_memory_or_rows_end() -> None:
    adapter = Tuning(SHAPE, LoraConfig(), ranks=2)
    memory = Memory(10, 12)
    for budget, rows in ((13.0, 1), (14.0, 2), (20.0, 4), (1e9, 16)):
        assert tuning_speed.with_fitting_rows(adapter, memory, budget).rows == rows
    assert tuning_speed.rows_of_step(64) == 1


@pytest.mark.parametrize("speed", SPEEDS, ids=lambda speed: f"{speed.who} {speed.model}")
def test_published_speeds_are_within_what_the_table_says(speed) -> None:
    assert recipes.LEAST <= speed.predicted() / speed.tokens_per_second <= recipes.MOST


def test_flags_are_those_beyond_the_defaults() -> None:
    tuning = Tuning(SHAPE, None, ranks=2)
    assert [short_flags(tuning) for tuning in settings(SHAPE, None, 2)] == [
        "", "--checkpoint_activations", "--offload_activations",
        "--shard=full", "--checkpoint_activations --shard=full", "--offload_activations --shard=full",
    ]  # fmt: skip
    assert short_flags(replace(tuning, shard="full", ranks=1)) == ""
