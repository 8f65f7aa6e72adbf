"""The file of measured speeds: written whole, read with every field checked, and turned into rates."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanochat.common import UserError
from nanochat.planner import calibration
from nanochat.planner.cards import LINK, SHAPES
from tests.planner.support import BENCH


def written(folder: Path, **changes: Any) -> Path:
    path = folder / calibration.NAME
    calibration.save(BENCH, path)
    held = json.loads(path.read_text())
    held.update(changes)
    path.write_text(json.dumps({name: value for name, value in held.items() if value != "gone"}))
    return path


@pytest.mark.parametrize("bench", [BENCH, replace(BENCH, link_gb_per_s=None, cards=1)])
def test_what_is_saved_is_read_again(bench: calibration.Bench, tmp_path: Path) -> None:
    calibration.save(bench, tmp_path / "bench.json")
    assert calibration.read(tmp_path / "bench.json") == bench
    assert calibration.read(tmp_path / "other.json") is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "recipe"}, 'it is not a "nanochat card bench"'),
        ({"version": 2}, "its version is 2, and this code reads version 1"),
        ({"vector_gb_per_s": "gone"}, "vector_gb_per_s is missing"),
        ({"matmul_tflops": 0}, "matmul_tflops must be a number above 0, got '0'"),
        ({"matmul_tflops": -3.5}, "matmul_tflops must be a number above 0, got '-3.5'"),
        ({"launch_us": float("nan")}, "launch_us must be a number above 0, got 'nan'"),
        ({"launch_us": True}, "launch_us must be a number above 0, got 'True'"),
        ({"cards": 1.5}, "cards must be a number above 0, got '1.5'"),
        ({"cards": [8]}, "cards must be a number above 0"),
        ({"chip": 910}, "chip must be a short text, got '910'"),
        ({"chip": "x" * 101}, "chip must be a short text"),
        ({"torch": "a\x1b[31m"}, "torch must be a short text"),
    ],
)
def test_a_file_that_is_not_whole_gets_one_line(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        calibration.read(written(tmp_path, **changes))
    message = str(caught.value)
    assert words in message and "\n" not in message and message.endswith("measure again: python check_npu.py --bench")


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"'])
def test_a_file_that_is_no_measurement_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(UserError, match=r"bench.json cannot be (read|used)"):
        calibration.read(tmp_path / "bench.json")


def test_rates_are_the_measured_ones_with_the_share_of_the_models_shapes() -> None:
    rates = calibration.rates_from(BENCH)
    assert rates.matmul == pytest.approx(SHAPES * 260e12) and rates.full == pytest.approx(SHAPES * 70e12)
    assert (rates.attention, rates.vector, rates.link) == (110e12, 1.2e12, 120e9)
    assert rates.launch == pytest.approx(9.5e-6) and rates.server == 8
    assert rates.network == pytest.approx(LINK * 25e9)


def test_a_single_card_takes_the_link_of_the_network() -> None:
    rates = calibration.rates_from(replace(BENCH, link_gb_per_s=None, chip="SoC 999", cards=1))
    assert rates.link == rates.network > 0
