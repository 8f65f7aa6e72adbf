"""Says how much disk space and time a run of fine-tuning needs, before it trains."""

import shutil
from dataclasses import replace
from pathlib import Path

from nanochat.checkpoint_manager.resume import Start
from nanochat.common import base_dir, log, tr
from nanochat.device import Compute
from nanochat.models.qwen.model import Qwen
from nanochat.optim import OneRate
from nanochat.planner import expected
from nanochat.planner.forecast import Tuning
from nanochat.runtime.progress import amount, duration
from nanochat.train.fit.disk import of_checkpoints, saved_bytes
from nanochat.train.sizes import Batch, check_disk


def seconds_of(tuning: Tuning, model: Qwen, batch: Batch, steps: int, compute: Compute) -> float:
    """Return an estimate of the seconds that `steps` steps take.

    This is the planner's prediction if the planner knows the card. Otherwise, it follows from the
    usual share of the peak FLOP/s.
    """
    # `tuning` does not have the final number of rows per pass while that is still to be probed
    split = replace(tuning, rows=batch.device_batch_size)
    seconds = expected.of_tuning(split, batch.passes, compute)
    if seconds is not None:
        return steps * seconds
    tokens = steps * batch.tokens_per_step
    return expected.at_usual_speed(model, tokens, compute.world_size, compute)


def log_needs(
    tuning: Tuning,
    model: Qwen,
    batch: Batch,
    steps: int,
    folder: Path,
    keep: int,
    resume: Start,
    compute: Compute,
) -> None:
    """Log the disk space and the time of a run of `steps` steps, whose checkpoints go to `folder`.

    The run keeps its `keep` newest checkpoints, or all of them if `keep` is 0, and `resume` is the
    value of --resume. Raises UserError, and warns, as check_disk() does.
    """
    tensors = saved_bytes(model, OneRate(0.0))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    check_disk(folder, trained, tensors, keep, resume)
    # A new checkpoint is written before the oldest one is deleted.
    needed = of_checkpoints(tensors, (keep or 1) + 1)
    values = {
        "folder": base_dir(),
        "needed": amount(needed, "B"),
        "checkpoint": amount(of_checkpoints(tensors), "B"),
        "free": amount(shutil.disk_usage(base_dir()).free, "B"),
    }
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
    seconds = seconds_of(tuning, model, batch, steps, compute)
    log(
        tr(
            "time: about {time} to train on {tokens:,} tokens; loading, validating, saving and writing "
            "own words come on top",
            time=duration(seconds),
            tokens=steps * batch.tokens_per_step,
        )
    )
