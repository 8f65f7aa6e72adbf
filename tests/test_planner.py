"""The model on paper: host against device, and the flags that follow."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanochat import planner
from nanochat.common import UserError
from nanochat.gpt import GPTConfig
from nanochat.platforms import ascend_chips

ROOT = Path(__file__).resolve().parent.parent
SHAPE = GPTConfig(2048, 32768, 12, 6, 6, 768)
CHIPS = {chip.name: chip for chip in ascend_chips.CHIPS}


def test_a_pass_takes_launches_on_the_host_and_flops_on_the_card() -> None:
    took = planner.estimate(SHAPE, flops_per_token=10**9, rows=2, tflops=100)
    operators = 12 * planner.OPERATORS_PER_LAYER + planner.OPERATORS_PER_PASS
    assert took.host_seconds == pytest.approx(operators * planner.LAUNCH_SECONDS)
    assert took.device_seconds == pytest.approx(1e9 * 2 * 2048 / (planner.REACHED * 100e12))
    assert took.compute_bound == (took.device_seconds > took.host_seconds)


@pytest.mark.parametrize("tflops", [50, 313, 5000])
def test_the_least_rows_are_the_first_that_keep_the_card_busy(tflops: float) -> None:
    rows = planner.least_rows(SHAPE, 10**9, tflops)
    assert planner.estimate(SHAPE, 10**9, rows, tflops).compute_bound
    assert rows == 1 or not planner.estimate(SHAPE, 10**9, rows // 2, tflops).compute_bound


@pytest.mark.parametrize(
    ("ranks", "chip", "rows"), [(8, "910B3", 16), (1, "910B3", 64), (1, "910B4", 16), (8, "910A", 16)]
)
def test_the_flags_fit_the_memory_and_divide_the_step(ranks: int, chip: str, rows: int) -> None:
    flags = planner.plan(planner.Config(), CHIPS[chip], ranks)
    assert flags == f"--depth=12 --total_batch_size=262144 --device_batch_size={rows}"


def test_a_step_that_the_cards_cannot_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"total_batch_size must be a multiple of 6,144 \(3 card\(s\) x 2048 tokens\)"):
        planner.plan(planner.Config(), CHIPS["910B3"], 3)


def test_an_inference_card_gets_no_training_flags() -> None:
    with pytest.raises(UserError, match="310P cards are for inference only"):
        planner.plan(planner.Config(), CHIPS["310P"], 1)


def test_the_command_prints_flags_alone_on_standard_output() -> None:
    command = [sys.executable, "-m", "nanochat.planner", "--chip=910B3", "--ranks=4", "--depth=4"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "--depth=4 --total_batch_size=262144 --device_batch_size=32\n"
    assert "910B3 x 4: " in done.stderr


def test_a_chip_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match=r"--chip must be one of 910A, 310P, .*got '910'"):
        planner.main(planner.Config(chip="910", ranks=1))


def test_a_host_without_cards_must_name_them() -> None:
    with pytest.raises(UserError, match="this host has no card of a known kind; name a kind with --chip"):
        planner.main(planner.Config())


@pytest.mark.parametrize("name", ["npu-speed.md", "zh/npu-speed.md"])
def test_the_documents_show_the_table_as_it_is(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "\n".join(planner.table(32768).splitlines()[1:]) in text
    for number in (planner.OPERATORS_PER_LAYER, planner.OPERATORS_PER_PASS, 1e6 * planner.LAUNCH_SECONDS):
        assert f"{number:g}" in text


def test_the_table_has_a_row_for_every_chip_that_trains(capsys: pytest.CaptureFixture[str]) -> None:
    planner.main(planner.Config(table=True))
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split("|")[1].strip() for row in rows] == [chip.name for chip in ascend_chips.CHIPS if chip.trains]
