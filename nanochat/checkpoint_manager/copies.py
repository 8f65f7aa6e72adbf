"""Whole copies of a model in training, for evaluations and replies between two steps."""

import copy
from dataclasses import replace
from typing import Any, cast

import torch.nn as nn

from nanochat.checkpoint_manager.families import allocate, cast_matrices, on_meta
from nanochat.device import Compute
from nanochat.model import Model
from nanochat.runtime import parallel


def uninitialised_copy(trained: Model, compute: Compute) -> Model:
    """Return a model of the same shape with matrices in the compute dtype, but no values yet.

    The trained model may be sharded, and have adapters, which the copy does not have.
    """
    whole = on_meta(cast(Any, trained.config), compute).eval()
    cast_matrices(whole, compute.dtype)
    allocate(whole, compute.device)
    return whole


def whole_copy(trained: Model, compute: Compute) -> Model:
    """Return a copy of a model, which may be sharded, with matrices in the compute dtype.

    Ranks that do not call this must iterate over parallel.whole_parameters(trained) instead.
    Neither the trained model nor a random generator changes.
    """
    whole = uninitialised_copy(trained, compute)
    parallel.refresh(cast(nn.Module, whole), cast(nn.Module, trained))
    return whole


def served_copy(trained: Model, compute: Compute) -> Model:
    """Return a whole_copy() that is laid out for inference, so that its weights must stay."""
    compute = with_own_operations(compute)
    whole = whole_copy(trained, compute)
    compute.operations.serve(cast(nn.Module, whole))
    return whole


def with_own_operations(compute: Compute) -> Compute:
    """Return a Compute whose operations serve a copy without changing how training rounds."""
    return replace(compute, operations=copy.copy(compute.operations))
