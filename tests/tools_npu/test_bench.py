"""check_npu.py --bench and --share: long measurements, a file that the planner reads, Markdown without names."""

import getpass
import socket
from dataclasses import replace
from pathlib import Path

import pytest

import check_npu
from nanochat.planner import calibration
from tests.planner.support import BENCH
from tools_npu import bench


class Clock:
    """A device that works for `each` seconds a call, while the host only queues."""

    def __init__(self, each: float):
        self.now, self.queued, self.each, self.waits = 0.0, 0, each, 0

    def work(self) -> None:
        self.queued += 1

    def wait(self) -> None:
        self.now += self.queued * self.each + 0.5  # half a second to wait at all, as a slow launch would take
        self.queued, self.waits = 0, self.waits + 1


@pytest.mark.parametrize("each", [1e-4, 0.3, 5.0])
def test_work_is_queued_for_seconds_so_that_waiting_hardly_counts(each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(each)
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now)
    took = bench.average(clock.work, 20.0, clock.wait)
    assert each <= took <= each * 1.2
    assert clock.waits < 8


def test_what_is_shared_names_no_host_user_or_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    text = bench.shared(BENCH)
    for private in (socket.gethostname(), getpass.getuser(), str(Path.home()), str(calibration.path_of().parent)):
        assert private not in text
    for figure in ("260 TFLOP/s", "1,200 GB/s", "9.50 us", "120 GB/s", "8 x 910B3", "CANN 8.5.0", "± 15 %"):
        assert figure in text
    assert "| 910B3 | 8 | d24 |" in text


def test_a_chip_that_no_table_knows_is_shared_without_predictions() -> None:
    text = bench.shared(replace(BENCH, chip="SoC 999", link_gb_per_s=None, cards=1))
    assert "### 1 x SoC 999" in text and "| one card |" in text and "predicted" not in text


@pytest.mark.parametrize(
    ("figure", "text"), [(0.05467, "0.0547"), (9.5, "9.50"), (99.96, "100"), (260.04, "260"), (1234.0, "1,230")]
)
def test_figures_have_three_digits_however_small_they_are(figure: float, text: str) -> None:
    assert bench.digits(figure) == text


def test_sharing_reads_the_file_or_says_how_to_make_one(
    base_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "en")
    assert bench.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("error: nothing has been measured on this host yet") and "check_npu.py --bench" in said
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    assert bench.main() == 1 and "还没有测量过" in capsys.readouterr().err
    calibration.save(BENCH, base_folder / calibration.NAME)
    assert bench.main() == 0
    assert capsys.readouterr().out.startswith("### 8 x 910B3\n")
    (base_folder / calibration.NAME).write_text('{"format": "other"}')
    assert bench.main() == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_sharing_needs_a_python_with_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check_npu, "python_with_torch", lambda: "")
    for language, word in (("en", "neither this Python"), ("zh", "都没有 torch")):
        assert check_npu.main(["--share", "--lang", language]) == 1
        said = capsys.readouterr().err
        assert word in said and "bash setup_ascend.sh" in said
