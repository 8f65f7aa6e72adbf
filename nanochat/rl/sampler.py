"""The unsharded copy of the trained model that RL samples from, in the device's fastest layout."""

import copy
from dataclasses import replace
from typing import Any, cast

import torch.nn as nn

from nanochat.checkpoint_manager.families import allocate, cast_matrices, on_meta
from nanochat.device import Compute
from nanochat.model import Model
from nanochat.runtime import parallel


class Sampler:
    """A copy of a model for inference, with matrices in the compute dtype.

    The trained model may be sharded. The weights of the copy are uninitialised until renew().
    """

    def __init__(self, trained: Model, compute: Compute):
        # The copy gets its own operations, so that changes to them for serving do not affect the
        # rounding of the trained model.
        self.operations = copy.copy(compute.operations)
        own_compute = replace(compute, operations=self.operations)
        self.model = on_meta(cast(Any, trained.config), own_compute).eval()
        cast_matrices(self.model, compute.dtype)
        allocate(self.model, compute.device)

    def renew(self, trained: Model) -> None:
        """Copy the weights of `trained` to `model`. Every rank must call this after each update."""
        module = cast(nn.Module, self.model)
        self.operations.release(module)
        parallel.refresh(self.model, cast(nn.Module, trained))
        self.operations.serve(module)
