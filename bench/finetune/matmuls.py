"""Multiplies by the matrices of one fine-tuning step and does nothing else, for bench.finetune.

Forward, every matrix is multiplied with its inputs. Backward, one product gives the gradient of the
inputs, and a second one the gradient of the matrix if it is trained. In attention, each query meets
half of the row's keys, which is what a causal mask leaves on average. The products inside of
DeltaNets are left out.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nanochat.linear import Linear
from nanochat.models.lora import LowRank, adapted
from nanochat.models.qwen.experts import Router
from nanochat.models.qwen.layers import Attention
from nanochat.models.qwen.model import Qwen

DEVIATION = 0.02  # of the random numbers that are multiplied


@dataclass(frozen=True)
class Product:
    """A product of the forward pass: (rows, inputs) with a matrix (outputs, inputs)."""

    rows: int
    inputs: int
    outputs: int
    trained: bool  # whether the backward pass also needs the gradient of the matrix
    heads: int = (
        0  # products that are computed in one call; 0: a single one, without that dimension
    )


def products(model: Qwen, batch: tuple[int, int]) -> Iterator[Product]:
    """Yield the products of a step of `batch`: rows, and tokens of a row."""
    rows, tokens = batch
    step_tokens = rows * tokens
    config = model.config
    for module in model.modules():
        if isinstance(module, Linear | Router):
            outputs, inputs = module.weight.shape
            yield Product(step_tokens, inputs, outputs, module.weight.requires_grad)
        if isinstance(module, Attention):
            heads = rows * config.n_head
            keys = tokens // 2
            yield Product(tokens, config.head_dim, keys, True, heads)  # the scores
            yield Product(tokens, keys, config.head_dim, True, heads)  # the means of values
    for name, weight in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            yield from expert_products(weight, config.experts_per_token * step_tokens)
    for _, adapter in adapted(model):
        if isinstance(adapter, LowRank):
            for factor in (adapter.first.weight, adapter.second.weight):
                outputs, inputs = factor.shape
                yield Product(step_tokens, inputs, outputs, True)
        else:
            for factors in adapter(torch.float32):
                yield from expert_products(factors, config.experts_per_token * step_tokens)
    outputs, inputs = model.head.shape
    chunk = min(model.head.chunk, step_tokens)
    for _ in range(step_tokens // chunk):
        yield Product(chunk, inputs, outputs, model.head.weight.requires_grad)


def expert_products(
    stack: Tensor,  # (experts, outputs, inputs)
    rows: int,  # of all experts, which get as many each
) -> Iterator[Product]:
    """Yield the products of the experts of a layer."""
    experts, outputs, inputs = stack.shape
    for _ in range(experts):
        yield Product(rows // experts, inputs, outputs, stack.requires_grad)


def multiplier(model: Qwen, batch: tuple[int, int], dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that computes the products of a step; equal shapes share random tensors.

    The model may be on the meta device.
    """
    everything = list(products(model, batch))

    @functools.cache
    def tensor(role: str, *shape: int) -> Tensor:
        return torch.randn(shape).mul_(DEVIATION).to(dtype)

    def step() -> None:
        for product in everything:
            stack = (product.heads,) if product.heads else ()
            x = tensor("x", *stack, product.rows, product.inputs)
            y = tensor("y", *stack, product.rows, product.outputs)
            x_grad = tensor("x_grad", *stack, product.rows, product.inputs)
            matrix = tensor("matrix", *stack, product.outputs, product.inputs)
            torch.matmul(x, matrix.mT, out=y)
            torch.matmul(y, matrix, out=x_grad)
            if product.trained:
                matrix_grad = tensor("matrix_grad", *stack, product.outputs, product.inputs)
                torch.matmul(y.mT, x, out=matrix_grad)

    return step
