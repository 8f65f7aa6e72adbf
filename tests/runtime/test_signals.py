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
from tests.support.faults import corpus, digests, stage
from tests.support.rank_pool import Pool
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


def test_before_anything_is_trained_one_process_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(signals.Stopped), signals.caught(Pulse()):
        press()
        pytest.fail("it went on")
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


def pressed_in(patch: pytest.MonkeyPatch, place: Any, name: str, call: int) -> None:
    """Send SIGTERM at the beginning of a call of a function."""
    real, count = getattr(place, name), 0

    def pressed(*arguments: Any, **rest: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            press()
        return real(*arguments, **rest)

    patch.setattr(place, name, pressed)


PLACES = [("compilation", runs, "compiled", 1, 0)]


@pytest.mark.parametrize(("place", "name", "call", "step"), [case[1:] for case in PLACES], ids=[c[0] for c in PLACES])
def test_a_stage_that_a_signal_stopped_goes_on_exactly(
    base_folder: Path, place: Any, name: str, call: int, step: int
) -> None:
    corpus(base_folder)
    compute = on_cpu()
    with pytest.MonkeyPatch.context() as patch, signals.caught(compute.pulse):
        compute.pulse.beat()
        pressed_in(patch, place, name, call)
        stage(compute)
    folder = stage_folder(base_folder, "base")
    assert [path.name for path in folder.glob("step_*")] == ([f"step_{step:06d}"] if step else [])
    assert not (base_folder / "report" / "sections" / "base_train.json").exists()
    stage(on_cpu())
    stopped = digests(base_folder), [line.get("val_bpb") for line in read_metrics(folder)]
    assert (base_folder / "report" / "sections" / "base_train.json").exists()
    stage(on_cpu(), resume="none")
    assert stopped == (digests(base_folder), [line.get("val_bpb") for line in read_metrics(folder)])
