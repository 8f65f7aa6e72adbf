"""The unsharded copy of the trained model that RL samples from, in the device's fastest layout.

The copy has no adapters: each renewal merges those of the trained model into its matrices, so that
a reply costs what it costs without them. The same copy is the model that RL started from as soon
as the adapters of the beginning are merged into it instead.
"""

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.nn as nn
from torch import Tensor

from nanochat.checkpoint_manager.copies import uninitialised_copy, with_own_operations
from nanochat.device import Compute
from nanochat.model import Model
from nanochat.models.lora import Adapter, adapted, delta, stack_of
from nanochat.runtime import parallel

# Returns the model that RL started from, for passes without gradients.
Reference = Callable[[], Model]


class Sampler:
    """A copy of a model for inference, with matrices in the compute dtype.

    The trained model may be sharded. The weights of the copy are uninitialised until renew().
    """

    def __init__(self, trained: Model, compute: Compute):
        own_compute = with_own_operations(compute)
        self.operations = own_compute.operations
        self.model = uninitialised_copy(trained, own_compute)

    def renew(self, trained: Model, adapters: Mapping[str, Tensor] | None = None) -> None:
        """Copy the weights of `trained` to `model`, and merge adapters into them.

        These are the adapters of `trained` or, if given, the values `adapters` of earlier ones, by
        parameter name. Every rank must call this after each update.
        """
        module = cast(nn.Module, self.model)
        self.operations.release(module)
        own_adapters = _copy_weights(module, cast(nn.Module, trained))
        _merge(module, cast(nn.Module, trained), own_adapters if adapters is None else adapters)
        self.operations.serve(module)


@torch.no_grad()
def _copy_weights(replica: nn.Module, trained: nn.Module) -> dict[str, Tensor]:
    """Copy the weights of a model to a replica without adapters, and return those of its adapters.

    The values are whole, by parameter name. Every rank must call this.
    """
    targets = dict(replica.named_parameters())
    adapters = {}
    for name, value in parallel.whole_parameters(trained):
        if ".lora_" in name:
            adapters[name] = value
        else:
            targets[name].copy_(value)
    return adapters


@torch.no_grad()
def _merge(replica: nn.Module, trained: nn.Module, adapters: Mapping[str, Tensor]) -> None:
    """Add the adapters of a model to the matrices and stacks of a replica, computing in fp32."""
    for name, adapter in adapted(trained):
        weight = replica.get_parameter(stack_of(name) or f"{name}.weight")
        change = delta(Adapter(adapter.config, _of_module(adapters, name)), name, weight.device)
        weight.copy_(weight.float() + change)


def _of_module(adapters: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return the two values of the adapter in the module called `name`."""
    names = (f"{name}.lora_A.weight", f"{name}.lora_B.weight")
    return {value_name: adapters[value_name] for value_name in names}


def reference_of(trained: Model, sampler: Sampler, compute: Compute) -> Reference:
    """Return a function that returns the model as it is now, whatever it learns later.

    A model whose every parameter is trained is copied. Of a model with adapters only these are
    copied, and the function merges them into the copy that `sampler` holds: that takes no memory,
    but the sampler must be renewed before it is sampled from again. Every rank must call this, and
    later the function.
    """
    module = cast(nn.Module, trained)
    beginning = {
        name: value.clone() for name, value in parallel.whole_parameters(module) if ".lora_" in name
    }
    if not beginning:
        second = Sampler(trained, compute)
        second.renew(trained)
        return lambda: second.model

    def with_beginning() -> Model:
        sampler.renew(trained, beginning)
        return sampler.model

    return with_beginning
