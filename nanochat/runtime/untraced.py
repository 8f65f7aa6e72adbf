"""Optimizers that torch.compile never traces, since only models are compiled here.

torch imports its compiler, which takes about two seconds, to keep some methods of its optimizers
out of traced code. These classes have the same methods without that.
"""

import inspect

import torch


class UntracedOptimizer(torch.optim.Optimizer):
    """torch's base class of optimizers, without the import of torch's compiler."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(UntracedOptimizer, torch.optim.AdamW):
    """torch's AdamW, without the import of torch's compiler."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
