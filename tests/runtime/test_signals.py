"""Signals are noted and acted on at the next step, by all ranks; without training they act at once."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from nanochat import run as runs
from nanochat.common import Pulse
from nanochat.device import Compute
from nanochat.runtime import signals
from nanochat.runtime.tracking import read_metrics
from tests.support.faults import corpus, stage
from tests.support.ranks import Pool
from tests.support.small_world import stage_folder
from tests.support.tiny_model import on_cpu


def press(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_noted_and_the_handlers_are_put_back(number: int) -> None:
    before = [signal.getsignal(each) for each in signals.CAUGHT]
    compute = on_cpu()
    with signals.caught(compute.pulse):
        compute.pulse.beat(7)
        assert not signals.agreed(compute)
        press(number)
        assert compute.pulse.stop_reason == signal.Signals(number).name
        assert signals.agreed(compute)
        with pytest.raises(signals.Stopped):
            signals.check(compute)
        with pytest.raises(signals.Stopped):
            signals.check_alone(compute)
    assert [signal.getsignal(each) for each in signals.CAUGHT] == before
    signals.check(compute)


def test_before_anything_is_trained_one_process_stops_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(signals.Stopped), signals.caught(Pulse()):
        press()
        pytest.fail("it went on")
    assert "saving" not in capfd.readouterr().err
    monkeypatch.setenv("RANK", "0")
    with signals.caught(pulse := Pulse()):  # ranks only stop together
        press()
        assert pulse.stop_reason == "SIGTERM"


def test_a_second_ctrl_c_stops_one_process_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), signals.caught(pulse := Pulse()):
        pulse.beat()
        press(signal.SIGINT)
        press(signal.SIGTERM)  # what a launcher hands on is not impatience
        press(signal.SIGINT)
        pytest.fail("it went on")


def test_a_stop_passes_edges_that_catch_what_foreign_code_raises() -> None:
    assert not issubclass(signals.Stopped, Exception)


def noted_on_rank_1(compute: Compute) -> list[bool]:
    with signals.caught(compute.pulse):
        found = [signals.agreed(compute)]
        if compute.rank == 1:
            press()
        found.append(signals.agreed(compute))
    return found


@pytest.mark.ranks
def test_a_signal_to_one_rank_is_known_to_all(pool: Pool) -> None:
    assert pool.run(2, noted_on_rank_1) == [[False, True]] * 2


def test_a_signal_in_a_compilation_leaves_no_step_and_the_next_start_trains(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus(base_folder)
    compute, real = on_cpu(), runs.compiled

    def pressed(*arguments: Any) -> Any:
        press()
        return real(*arguments)

    with monkeypatch.context() as patch, signals.caught(compute.pulse):
        compute.pulse.beat()
        patch.setattr(runs, "compiled", pressed)
        with pytest.raises(signals.Stopped):  # nothing is trained that would have to be saved
            stage(compute, num_iterations=2)
    folder = stage_folder(base_folder, "base")
    assert not list(folder.glob("step_*"))
    assert not (base_folder / "report" / "sections" / "base_train.json").exists()
    stage(on_cpu(), num_iterations=2)
    assert [line["step"] for line in read_metrics(folder)] == [1, 2]
