"""Fused operators of the real package as plain arithmetic on the CPU, with the limits of the real kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_npu import _load

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def refuse(operator: str, problem: str) -> None:
    """Raise the error of a kernel that cannot take its arguments."""
    raise RuntimeError(f"call aclnn kernel of '{operator}' failed, error code is 161002. EZ9999: {problem}")


def check_devices(operator: str, *tensors: Tensor | None) -> int:
    """The index of the npu that all tensors are on."""
    devices = list(dict.fromkeys(tensor.device for tensor in tensors if tensor is not None))
    if len(devices) > 1:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {devices[0]} and "
            f"{devices[1]}! (operator {operator})"
        )
    if devices[0].type != "npu":
        raise NotImplementedError(
            f"Could not run 'npu::{operator}' with arguments from the '{devices[0].type}' backend."
        )
    return devices[0].index


class _Launch:
    """The compiled device during one launch of a fused operator, and how many bytes the launch has written."""

    def __init__(self, device: Any):
        self._device, self.written = device, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def give(self, result: Tensor, like: Tensor) -> Tensor:
        """Turn a CPU result into a tensor on the device of `like`."""
        result = result.contiguous()
        self.written += self._device.extent(result)
        self._device.saturate(result)
        return self._device.wrap(result, like.device.index)


@contextmanager
def kernel(operator: str, *tensors: Tensor | None) -> Iterator[Any]:
    """One launch on the device. Inside, CPU aliases compute without being logged. Yields the launch."""
    device = _load.device()
    if operator in _load.emulated()["chip"]["lacks"]:
        refuse(operator, f"the operator does not exist on {_load.emulated()['chip']['name']}")
    check_devices(operator, *tensors)
    for tensor in tensors:
        if tensor is not None:
            device.judge(operator, tensor)
    device.count_kernel(operator, 1, sum(device.extent(tensor) for tensor in tensors if tensor is not None))
    launch = _Launch(device)
    device.push_quiet(1)
    try:
        with torch.no_grad():
            yield launch
    finally:
        device.push_quiet(-1)
        device.count_kernel(operator, 0, launch.written)


def _norm(wide: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of fp32 numbers over gamma's dimensions, and the factors 1 / sqrt(...)."""
    dims = tuple(range(wide.dim() - gamma.dim(), wide.dim()))
    rstd = torch.rsqrt(wide.square().mean(dim=dims, keepdim=True) + epsilon)
    return wide * rstd * gamma.float(), rstd


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        with kernel("npu_rms_norm", x, gamma) as device:
            y, rstd = _norm(device.cpu_alias(x).float(), device.cpu_alias(gamma), epsilon)
            y, rstd = device.give(y.to(x.dtype), x), device.give(rstd, x)
        ctx.save_for_backward(x, gamma, rstd)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)  # no kernels that fill gradients with zeros: the real package launches none
        return y, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *npu_rms_norm_backward(grads[0], *ctx.saved_tensors), None


def npu_rms_norm_backward(dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of npu_rms_norm with respect to x and gamma."""
    with kernel("npu_rms_norm_backward", dy, self, gamma, rstd) as device:
        g, wide, scale, r = (device.cpu_alias(t).float() for t in (dy, self, gamma, rstd))
        dims = tuple(range(self.dim() - gamma.dim(), self.dim()))
        unit = wide * r
        towards = g * scale
        x_grad = r * (towards - unit * (towards * unit).mean(dim=dims, keepdim=True))
        leading = tuple(range(self.dim() - gamma.dim()))
        gamma_grad = (g * unit).sum(dim=leading) if leading else g * unit
        return device.give(x_grad.to(self.dtype), self), device.give(gamma_grad.to(torch.float32), self)


def refuse_gradients(operator: str, *tensors: Tensor) -> None:
    """Refuse tensors that need gradients: the real package has no derivative of the operator."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        refuse(operator, "the operator has no derivative: call it under torch.no_grad()")


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x1 + x2, its fp32 factors 1 / sqrt(...), and x1 + x2. The real package has no derivative for it."""
    name = "npu_add_rms_norm"
    if x1.dtype not in FLOATS or x2.dtype != x1.dtype or gamma.dtype != x1.dtype:
        refuse(name, f"x1, x2 and gamma must have one float format, got {x1.dtype}, {x2.dtype} and {gamma.dtype}")
    if x1.shape != x2.shape or tuple(gamma.shape) != tuple(x1.shape[x1.dim() - gamma.dim() :]):
        refuse(name, f"shapes must fit, got {tuple(x1.shape)}, {tuple(x2.shape)} and {tuple(gamma.shape)}")
    refuse_gradients(name, x1, x2, gamma)
    with kernel(name, x1, x2, gamma) as device:
        total = (device.cpu_alias(x1).float() + device.cpu_alias(x2).float()).to(x1.dtype)
        y, rstd = _norm(total.float(), device.cpu_alias(gamma), epsilon)
        return device.give(y.to(x1.dtype), x1), device.give(rstd, x1), device.give(total, x1)


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x²) + epsilon) * gamma over gamma's dimensions, and the fp32 factors 1 / sqrt(...)."""
    if self.dtype not in FLOATS or gamma.dtype not in (self.dtype, torch.float32):
        refuse("npu_rms_norm", f"x and gamma must have one float format, got {self.dtype} and {gamma.dtype}")
    if not 0 < gamma.dim() <= self.dim() or tuple(gamma.shape) != tuple(self.shape[self.dim() - gamma.dim() :]):
        refuse("npu_rms_norm", f"gamma's shape must be the end of x's, {tuple(self.shape)}, got {tuple(gamma.shape)}")
    return _RMSNorm.apply(self, gamma, epsilon)  # type: ignore[return-value]


def _turn(x: Tensor, mode: str) -> Tensor:
    """(-x2, x1), where x1 and x2 are the halves of the channels, or the two channels of each pair."""
    if mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


class _RotaryMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, r1: Tensor, r2: Tensor, mode: str) -> Tensor:
        ctx.save_for_backward(r1, r2)
        ctx.mode = mode
        with kernel("npu_rotary_mul", x, r1, r2) as device:
            wide, cos, sin = (device.cpu_alias(t).float() for t in (x, r1, r2))
            return device.give((cos * wide + sin * _turn(wide, mode)).to(x.dtype), x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        r1, r2 = ctx.saved_tensors
        with kernel("npu_rotary_mul_backward", grads[0], r1, r2) as device:
            g, cos, sin = (device.cpu_alias(t).float() for t in (grads[0], r1, r2))
            # turning twice negates, so the transpose of turning is its negative
            return device.give((cos * g - _turn(sin * g, ctx.mode)).to(grads[0].dtype), grads[0]), None, None, None


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """r1 * x + r2 * turned(x). r1 and r2 are full-width cosines and sines; they get no gradient here."""
    name = "npu_rotary_mul"
    if rotary_mode not in ("half", "interleave"):
        refuse(name, f"rotary_mode {rotary_mode!r} is not emulated")
    if self.dtype not in FLOATS or r1.dtype != self.dtype or r2.dtype != self.dtype:
        refuse(name, f"x, r1 and r2 must have one float format, got {self.dtype}, {r1.dtype}, {r2.dtype}")
    if self.dim() != 4 or r1.dim() != 4 or r1.shape != r2.shape:
        refuse(
            name, f"tensors must have four dimensions, got {tuple(self.shape)}, {tuple(r1.shape)}, {tuple(r2.shape)}"
        )
    width = self.size(-1)
    if width % 2 or width >= 896 or r1.size(-1) != width:
        refuse(name, f"D must be even, below 896 and the same in x, r1 and r2, got {width} and {r1.size(-1)}")
    if self.size(0) >= 1000 or self.size(2) >= 1000:
        refuse(name, f"B and N must be below 1000, got {self.size(0)} and {self.size(2)}")
    if any(r not in (1, s) for r, s in zip(r1.shape, self.shape, strict=True)):
        refuse(name, f"r1's shape {tuple(r1.shape)} does not broadcast to {tuple(self.shape)}")
    if torch.is_grad_enabled() and (r1.requires_grad or r2.requires_grad):
        refuse(name, "gradients of r1 and r2 are not emulated")
    return _RotaryMul.apply(self, r1, r2, rotary_mode)  # type: ignore[return-value]


def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys in place, x * cos + turned(x) * sin, and return them.

    The default layout differs between releases of the real package, so that it must be given here.
    """
    name = "npu_apply_rotary_pos_emb"
    refuse_gradients(name, query, key, cos, sin)
    if layout != "BSND" or rotary_mode != "half":
        refuse(name, f"layout {layout!r} with rotary_mode {rotary_mode!r} is not emulated")
    if query.dtype not in FLOATS or any(tensor.dtype != query.dtype for tensor in (key, cos, sin)):
        refuse(
            name, f"all tensors must have one float format, got {query.dtype}, {key.dtype}, {cos.dtype}, {sin.dtype}"
        )
    if not query.is_contiguous() or not key.is_contiguous():
        refuse(name, "query and key are overwritten and must be contiguous")
    batch, length, _, width = query.shape
    wide = 1024 if _load.emulated()["chip"]["soc"] >= 260 else 0
    if width % 2 or (width > wide if wide else width not in (64, 128)):
        refuse(name, f"D must be {'even and at most 1024' if wide else '64 or 128'} on this chip, got {width}")
    fits = (1, batch) if wide else (batch,)
    if (key.size(0), key.size(1), key.size(3)) != (batch, length, width) or cos.shape != sin.shape:
        refuse(name, f"shapes do not fit: {tuple(query.shape)}, {tuple(key.shape)}, {tuple(cos.shape)}")
    if cos.size(0) not in fits or tuple(cos.shape[1:]) != (length, 1, width):
        refuse(name, f"cos must be ({batch}, {length}, 1, {width}), got {tuple(cos.shape)}")
    with kernel(name, query, key, cos, sin) as device:
        c, s = (device.cpu_alias(tensor).float() for tensor in (cos, sin))
        for tensor in (query, key):
            alias = device.cpu_alias(tensor)
            alias.copy_((alias.float() * c + _turn(alias.float(), "half") * s).to(tensor.dtype))
    return query, key


def npu_get_float_status(self: Tensor, mode: int = 0) -> Tensor:
    """An fp32 tensor (8,); its first element is not 0 if an fp16 result overflowed since the flag was cleared."""
    with kernel("npu_get_float_status", self) as device:
        status = torch.zeros(8)
        status[0] = float(device.overflow_flag(False))
        return device.give(status, self)


def npu_clear_float_status(self: Tensor, mode: int = 0) -> Tensor:
    """Clear the overflow flag."""
    with kernel("npu_clear_float_status", self) as device:
        device.overflow_flag(True)
        return device.give(torch.zeros(8), self)
