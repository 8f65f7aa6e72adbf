"""Makes a whole copy of a model in training, for evaluations and replies between two steps."""

import copy
from dataclasses import replace
from typing import Any, cast

import torch.nn as nn

from nanochat.checkpoint_manager.families import allocate, cast_matrices, on_meta
from nanochat.device import Compute
from nanochat.model import Model
from nanochat.runtime import parallel


def whole_copy(trained: Model, compute: Compute, served: bool = False) -> Model:
    """Return a copy of a model, which may be sharded, with matrices in the compute dtype.

    If `served`, the copy is laid out for the device's fastest inference, so its weights must stay
    as they are. Ranks that do not call this must iterate over parallel.whole_parameters(trained)
    instead. Neither the trained model nor a random generator changes.
    """
    if served:
        # Operations of its own, so that serving does not change how the trained model rounds.
        compute = replace(compute, operations=copy.copy(compute.operations))
    whole = on_meta(cast(Any, trained.config), compute).eval()
    cast_matrices(whole, compute.dtype)
    allocate(whole, compute.device)
    parallel.refresh(whole, cast(nn.Module, trained))
    if served:
        compute.operations.serve(whole)
    return whole
