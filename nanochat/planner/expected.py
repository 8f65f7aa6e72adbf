"""Predicts the seconds of a step from the model and the split of the step, for every announcement.

Training, the preflight and the planner's tables tell a time by the same arithmetic: that of
roofline.py for a GPT, and that of tuning_speed.py for fine-tuning.
"""

from typing import Any

from nanochat import device
from nanochat.device import Compute
from nanochat.gpt import GPT
from nanochat.model import Model
from nanochat.planner import calibration
from nanochat.planner.cards import Rates
from nanochat.planner.forecast import Tuning
from nanochat.planner.programs import program_of
from nanochat.planner.roofline import step_of
from nanochat.planner.tuning_speed import program_for
from nanochat.planner.tuning_speed import step_of as tuning_step_of
from nanochat.planner.work import size_of_model
from nanochat.platforms.base import Chip
from nanochat.schedule import expected_seconds


def rates_here(compute: Compute) -> tuple[Chip, Rates] | None:
    """Return the kind of card that this process uses and its rates, or None if they are unknown.

    Raises UserError if the file with the measured speed of the cards is damaged.
    """
    chip = compute.platform.chip
    if chip is None or not chip.trains:
        return None
    rates, _ = calibration.rates_for(chip, calibration.read(calibration.path_of()))
    return None if rates is None else (chip, rates)


def of_model(model: Any, rows: int, passes: int, compute: Compute) -> float | None:
    """Return the seconds of a step that trains all of `model`.

    On each rank, the step has `passes` passes over `rows` rows. Returns None if the model is not a
    GPT, or if the rates of the card are unknown. Raises UserError as rates_here() does.
    """
    card = rates_here(compute)
    if card is None or not isinstance(model, GPT):
        return None
    chip, rates = card
    size = size_of_model(model)
    step = step_of(size, rows, passes, compute.world_size, rates, program_of(chip.name))
    return step.seconds


def of_tuning(tuning: Tuning, passes: int, compute: Compute) -> float | None:
    """Return the seconds of a step of fine-tuning with `passes` passes on each rank.

    Returns None if the rates of the card are unknown. Raises UserError as rates_here() does.
    """
    card = rates_here(compute)
    if card is None:
        return None
    chip, rates = card
    program = program_for(tuning, chip.name)
    return tuning_step_of(tuning, passes * tuning.rows, rates, program).seconds


def at_usual_speed(model: Model, tokens: float, devices: int, compute: Compute) -> float:
    """Return the seconds that training on `tokens` tokens takes on `devices` devices like this one.

    This assumes the share of the peak FLOP/s that such devices usually reach, for cards and models
    that the planner does not know.
    """
    peak, _ = device.peak_flops(compute)
    usual = compute.platform.usual_mfu()
    return expected_seconds(tokens, model.flops_per_token(), peak * devices, usual)
