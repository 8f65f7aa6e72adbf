"""Says how much disk space and time a run of fine-tuning needs, before it trains."""

import shutil

from nanochat import device
from nanochat.common import UserError, base_dir, log, tr
from nanochat.device import Compute
from nanochat.models.qwen.model import Qwen
from nanochat.optim import OneRate, saved_bytes
from nanochat.planner import calibration
from nanochat.planner.forecast import Tuning
from nanochat.planner.tuning_speed import program_for, rows_of_step, step_of
from nanochat.runtime.progress import amount, duration
from nanochat.schedule import expected_seconds
from nanochat.train.fit.disk import BESIDE_TENSORS


def seconds_of(
    tuning: Tuning, model: Qwen, tokens: int, preferences: bool, compute: Compute
) -> float:
    """Return an estimate of the seconds that training on `tokens` tokens takes.

    This is the planner's prediction if the planner knows the card. Otherwise, it follows from the
    usual share of the peak FLOP/s.
    """
    chip = compute.chip
    if chip is not None and chip.trains:
        rates, _ = calibration.rates_for(chip, calibration.read(calibration.path_of()))
        if rates is not None:
            rows = max(rows_of_step(tuning.ranks), tuning.rows)
            step = step_of(tuning, rows, rates, program_for(tuning, chip.name))
            return 3600 * step.hours(tokens, preferences)
    peak, _ = device.peak_flops(compute)
    usual = compute.platform.usual_mfu()
    peak_of_all = peak * compute.world_size
    return expected_seconds(tokens, model.flops_per_token(), peak_of_all, usual)


def log_needs(
    tuning: Tuning, model: Qwen, tokens: int, preferences: bool, keep: int, compute: Compute
) -> None:
    """Log the disk space and the time of a run that trains on `tokens` tokens.

    The run keeps its `keep` newest checkpoints, or all of them if `keep` is 0. Raises UserError
    (exit code 2) if the base folder has less space than that.
    """
    checkpoint = BESIDE_TENSORS * saved_bytes(model, OneRate(0.0))
    free = shutil.disk_usage(base_dir()).free
    # A new checkpoint is written before the oldest one is deleted.
    needed = checkpoint * ((keep or 1) + 1)
    values = {
        "folder": base_dir(),
        "needed": amount(needed, "B"),
        "checkpoint": amount(checkpoint, "B"),
        "free": amount(free, "B"),
    }
    if needed > free:
        raise UserError(
            tr(
                "{folder} has {free} free, and the checkpoints take up to {needed}: free some space, "
                "lower --keep, or set NANOCHAT_BASE_DIR to a folder on another disk",
                **values,
            ),
            exit_code=2,
        )
    if keep:
        log(
            tr(
                "disk: up to {needed} in {folder}, which has {free} free ({checkpoint} a checkpoint)",
                **values,
            )
        )
    else:
        log(
            tr(
                "disk: {checkpoint} for each checkpoint in {folder}, which has {free} free; "
                "--keep=0 keeps all",
                **values,
            )
        )
    seconds = seconds_of(tuning, model, tokens, preferences, compute)
    log(
        tr(
            "time: about {time} to train on {tokens:,} tokens; loading, validating and saving come "
            "on top",
            time=duration(seconds),
            tokens=tokens,
        )
    )
