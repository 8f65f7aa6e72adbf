"""The planner's command: flags on standard output, reasons on standard error, tables that the documents repeat."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat import device
from nanochat.common import UserError
from nanochat.planner import __main__ as command
from nanochat.planner import calibration, plan, tables
from nanochat.planner.cards import LAUNCH_SECONDS, RATINGS, rates_of
from nanochat.planner.plan import plan_of
from nanochat.planner.presets import core_while_training
from nanochat.planner.programs import CHUNKED, FUSED, PLAIN
from nanochat.planner.work import size_of
from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.train.fit import disk
from tests.planner.support import BENCH, Kind
from tests.support.english_lines import english_lines

ROOT = Path(__file__).resolve().parent.parent.parent
CHIPS = {chip.name: chip for chip in ascend_chips.CHIPS}


def said(capsys: pytest.CaptureFixture[str], **flags: object) -> tuple[str, str]:
    command.main(command.Config(**flags))  # type: ignore[arg-type]
    told = capsys.readouterr()
    return told.out, told.err


@pytest.mark.parametrize(
    ("ranks", "chip", "rows"), [(8, "910B3", 16), (1, "910B3", 32), (1, "910B4", 16), (8, "910A", 16)]
)
def test_the_flags_fit_the_memory_and_divide_the_step(
    ranks: int, chip: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = said(capsys, chip=chip, ranks=ranks)
    assert out == f"--depth=12 --total_batch_size=262144 --device_batch_size={rows}\n"
    assert (
        f"{chip} x {ranks}: " in err
        and "(compute-bound from 1 row)" in err
        and "predicted, ± 25 %: " in err
        and " hours for 1.6 billion tokens" in err
    )


@pytest.mark.slow
def test_the_command_prints_flags_alone_on_standard_output() -> None:
    words = [sys.executable, "-m", "nanochat.planner", "--chip=910B3", "--ranks=4", "--depth=4",
             "--total_batch_size=262144"]  # fmt: skip
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "--depth=4 --total_batch_size=262144 --device_batch_size=32\n"
    assert "910B3 x 4: " in done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"chip": "910Z", "ranks": 1}, r"--chip must be one of 910A, 310P, .*got '910Z'"),
        ({"chip": "950", "ranks": 8}, r"got '950'. .* on a host that has such a card"),
        (
            {"chip": "910B3", "ranks": 3, "total_batch_size": 262144},
            r"must be a multiple of 6,144 \(3 card\(s\) x 2048 tokens\), got 262,144",
        ),
        ({"chip": "910B3", "ranks": 256, "total_batch_size": 262144}, r"must be a multiple of 524,288 .*got 262,144"),
        ({"chip": "910B3", "ranks": -1}, "--ranks must be at least 1, got -1"),
        ({"chip": "910B3", "ranks": 1, "depth": 0}, "depth and vocab_size must be at least 1, got 0 and 65536"),
        ({"chip": "310P", "ranks": 1}, "310P cards are for inference only"),
        ({"chip": "310P", "ranks": 1, "model": Path("Qwen3-8B")}, "310P cards are for inference only"),
        ({"chip": "910B", "ranks": 1}, r"--chip=910B may mean .*910B1, .*910B4-1"),
        ({"chip": "Atlas 800T A2", "ranks": 1}, r"may mean 910B1, .*910B4-1"),
        ({"chip": "Atlas 300I Duo", "ranks": 1}, "310P cards are for inference only"),
        ({"chip": "910A2", "ranks": 1}, r"--chip must be one of .*got '910A2'"),
        (
            {"chip": "910A", "ranks": 1, "depth": 32},
            r"into the 32 GiB of a 910A, but needs \d+\.\d GiB on each",
        ),
        ({}, "this host has no card of a known kind; name a kind with --chip"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(flags: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        command.main(command.Config(**flags))  # type: ignore[arg-type]


A2 = ["910B1", "910B2", "910B2C", "910B3", "910B4", "910B4-1"]


@pytest.mark.parametrize(
    ("spelled", "names"),
    [
        *((spelled, ["910B3"]) for spelled in ("Ascend910B3", "ascend 910b3", "910b3", "昇腾 910B3", " Ascend-910B3 ")),
        *((spelled, ["910B4-1"]) for spelled in ("910B4-1", "Ascend910B4-1", "910B4_1")),
        *(
            (spelled, ["910C"])
            for spelled in ("Ascend910_9382", "Ascend910_9362", "910C", "Atlas 900 A3 SuperPoD", "A3")
        ),
        *((spelled, ["910A"]) for spelled in ("Ascend910ProA", "Ascend910PremiumA", "Atlas 800 (Model 9000)")),
        *((spelled, ["310P"]) for spelled in ("310P3", "Ascend310P3", "Atlas 300I Duo", "Atlas 300I Pro")),
        *((spelled, ["310B"]) for spelled in ("Ascend310B4", "Atlas 200I A2")),
        *((spelled, ["950"]) for spelled in ("950PR", "Ascend950PR_9599", "950")),
        *((spelled, A2) for spelled in ("Atlas 800T A2", "华为 Atlas 800I A2", "A2")),
        ("910B", ["910A", *A2]),
        ("Ascend910", ["910A", "910C"]),  # as npu-smi prints an A3
        *((spelled, ["H100"]) for spelled in ("h100", "NVIDIA H100 80GB HBM3")),
        ("NVIDIA A100-SXM4-80GB", ["A100"]),
        *((spelled, []) for spelled in ("", "910A2", "Ascend310", "H1000", "V100")),
    ],
)
def test_a_chip_may_be_spelled_as_its_tools_or_its_box_spell_it(spelled: str, names: list[str]) -> None:
    assert [chip.name for chip in device.chips_called(spelled)] == names


@pytest.mark.parametrize("depth", disk.SHARDS)
def test_the_command_the_table_and_the_speedrun_name_one_speed(depth: int, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = said(capsys, chip="910B3", ranks=8, depth=depth)
    table = said(capsys, chip="910B3", ranks=8, table=True)[0]
    row = next(line for line in table.splitlines() if f"| d{depth} |" in line).split(" | ")
    assert f" {row[4].split(' ±')[0]} tokens/s" in err and f" {row[6]} hours" in err
    script = (ROOT / "speedrun.sh").read_text(encoding="utf-8")
    if depth == 12:
        assert (told := out.split()[1]) in script and told.endswith(str(plan.PRESET_TOKENS[12]))
    assert f"fineweb {disk.SHARDS[depth]} {depth}" in script


def test_a_preset_is_planned_for_named_cards_with_its_own_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: hours are tokens over speed, and upstream's model has fewer parameters."""
    ours = said(capsys, preset="gpt2", chip="910B3", ranks=16)[0]
    row = ours.splitlines()[6].split(" | ")
    assert row[:2] == ["| 910B3", "16"]
    speed, hours = int(row[3].split()[0].replace(",", "")), float(row[5])
    assert 8 * size_of(24, 32768).scaling / speed / 3600 == pytest.approx(hours, rel=0.02)
    theirs = said(capsys, preset="gpt2", chip="910B3", recipe="upstream")[0]
    assert f"{size_of(24, 32768, upstream=True).parameters:,} parameters" in theirs
    with pytest.raises(UserError, match="the presets d12, d20, gpt2, got 'd8'"):
        said(capsys, preset="d8")


def test_measuring_core_takes_two_percent_of_a_preset_at_most() -> None:
    billion = 10**9
    assert core_while_training(1.6 * billion) == (20, pytest.approx(0.0103, abs=1e-4))
    assert core_while_training(0.2 * billion)[1] <= 0.02
    assert core_while_training(0.01 * billion) == (0, 0)


def test_a_preset_without_a_card_is_planned_for_those_that_people_compare(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, preset="gpt2")[0]
    rows = [line.split(" | ")[:2] for line in out.splitlines() if line.startswith("| ")]
    assert rows[2:] == [["| H100, fp8", "8"], ["| H100", "8"], ["| 910B3", "8"], ["| 910B3", "16"]]
    assert "CC BY-NC 4.0, not for commercial use" in out and "FLOPs" in out
    rows = [line.split(" | ")[:2] for line in said(capsys, preset="d12", ranks=4)[0].splitlines() if " ± " in line]
    assert rows == [["| H100", "4"], ["| 910B3", "4"]]
    with pytest.raises(UserError) as refusal:
        said(capsys, preset="smoke")
    assert refusal.value.exit_code == 2


def test_a_chip_without_a_known_peak_is_planned_by_memory_alone() -> None:
    chip = Kind("SoC 999", 0, 64)
    rates, source = command.rates_for(chip, None)
    by_memory = plan_of(size_of(12, 32768), chip, 8, 262144, rates)
    assert by_memory.rows == 16
    assert (by_memory.step, by_memory.hours, by_memory.mfu) == (None, None, None)
    words = command.explain(by_memory, chip, rates, source)
    assert "SoC 999 x 8: 32 rows fit 64 GiB; planned by memory alone, because no peak of this chip is known" in words
    assert tables.cells(by_memory, chip)[1:4] == ["-", "-", "-"]


def test_measured_cards_are_planned_by_what_was_measured(
    base_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = said(capsys, chip="910B3", ranks=8)[1]
    calibration.save(BENCH, base_folder / calibration.NAME)
    after = said(capsys, chip="910B3", ranks=8)[1]
    assert "data sheet" in before and "measured on your cards, card_bench.json" in after and "± 15 %" in after
    assert said(capsys, chip="910B2", ranks=8)[1].count("data sheet") == 1
    assert "± 15 %" in said(capsys, chip="910B3", ranks=8, table=True)[0]
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    assert "15" in said(capsys, chip="910B3", ranks=8)[1].partition("±")[2][:5]


def test_a_measured_chip_without_a_known_peak_has_a_speed_but_no_mfu() -> None:
    chip = Kind("SoC 999", 0, 64)
    rates, source = command.rates_for(chip, calibration.Bench(**{**vars(BENCH), "chip": "SoC 999"}))
    measured = plan_of(size_of(12, 32768), chip, 8, 262144, rates, measured=True)
    assert measured.step is not None and measured.mfu is None
    assert "tokens/s, unknown peak, " in command.explain(measured, chip, rates, source)


def test_the_table_has_every_chip_that_trains_and_says_how_sure_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line.strip("| ").split(" | ") for line in said(capsys, table=True)[0].splitlines()[2:]]
    trains = [chip.name for chip in device.planned() if chip.trains]
    assert list(dict.fromkeys(row[0] for row in rows)) == trains
    assert len(rows) == len(trains) * len(tables.CARDS) * len(tables.DEPTHS)
    for row in rows:
        assert row[3] == "does not fit" or row[4].endswith(
            "± 25 %" if int(row[1]) <= RATINGS[row[0]].server else "± 40 %"
        ), row
    narrow = said(capsys, table=True, chip="910B3", ranks=8)[0].splitlines()[2:]
    assert narrow == ["| " + " | ".join(row) + " |" for row in rows if row[:2] == ["910B3", "8"]]


def test_a_model_that_one_card_cannot_hold_is_said_not_to_fit() -> None:
    chip = CHIPS["910A"]
    one = plan_of(size_of(32, 32768), chip, 1, 2**21, rates_of(chip))
    assert tables.cells(one, chip)[0] == "does not fit"
    assert one.memory > 32 * 2**30 > plan_of(size_of(32, 32768), chip, 8, 2**21, rates_of(chip)).memory


@pytest.mark.parametrize(("name", "language"), [("npu-speed.md", "en"), ("zh/npu-speed.md", "zh")])
def test_the_documents_show_the_tables_as_they_are(name: str, language: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", language)
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    chips = [chip for chip in CHIPS.values() if chip.trains and chip.tflops]
    every = tables.of_plans([CHIPS["910B3"]], (1, 8, 128), tables.DEPTHS, 65536, {}).splitlines()
    traffic = FUSED.traffic
    bytes_moved = (traffic.stream, traffic.logits, traffic.matrix, traffic.table, CHUNKED.traffic.stream)
    launched = (FUSED.layer_operators, FUSED.pass_operators, 1e6 * LAUNCH_SECONDS)
    for number in (*bytes_moved, PLAIN.traffic.stream, *launched):
        assert re.search(rf"(?<![\d,.]){number:,g}(?![\d,.]\d)", text), number
    for line in [*every, *tables.of_rows(chips, (4, 8, *tables.DEPTHS), tables.VOCABULARIES).splitlines(),
                 *tables.of_published().splitlines()]:  # fmt: skip
        if line.startswith("|"):
            assert line in text, line


def test_the_heads_of_the_tables_are_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    of_plans = tables.of_plans([CHIPS["910B3"]], (1,), (12,), 65_536, {})
    for table in (of_plans, tables.of_published()):
        cells = table.splitlines()[0].strip("| ").split(" | ")
        assert all(cell == "MFU" or english_lines(cell) == [] for cell in cells), cells
