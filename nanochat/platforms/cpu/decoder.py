"""Decoding passes of published models as a single call of C++.

With one new token in one row, the Python of some twelve operators a layer takes about half as long
as the products. decode.h calls the same operators in the same order, with the same results.
"""

import ctypes
from ctypes import c_int64, c_void_p
from typing import cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from nanochat.context import Cached
from nanochat.linear import Linear
from nanochat.platforms.cpu.kernels import MANY_QUERIES, Kernels
from nanochat.platforms.cpu.panels import Panels
from nanochat.platforms.cpu.stored import Packed, Packed8
from nanochat.platforms.qwen_layers import (
    OperatorAttention,
    OperatorBlock,
    OperatorMLP,
    OperatorNorm,
    OperatorQwen,
)

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}  # as in decode.h


class Unsupported(Exception):
    """A layer has a part that decode.h lacks."""


class Matrix(ctypes.Structure):
    """A matrix in panels or in blocks, as in decode.h."""

    _fields_ = [
        ("weights", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("format", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
    ]


class Layer(ctypes.Structure):
    """The matrices and norms of a layer, as in decode.h."""

    _fields_ = [
        ("q", Matrix),
        ("k", Matrix),
        ("v", Matrix),
        ("out", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("first_norm", c_void_p),
        ("second_norm", c_void_p),
        ("head_norms", c_void_p),
        ("window", c_int64),
        ("half", c_int64),
    ]


class Sizes(ctypes.Structure):
    """The sizes of a pass, as in decode.h."""

    _fields_ = [
        ("layers", c_int64),
        ("rows", c_int64),
        ("tokens", c_int64),
        ("channels", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("size", c_int64),
        ("hidden", c_int64),
        ("length", c_int64),
        ("slot", c_int64),
        ("layer", c_int64),
        ("turns", c_int64),
    ]


class Decoder:
    """Computes the final activations of a few new tokens, for a model whose weights stay."""

    def __init__(self, kernels: Kernels, model: OperatorQwen):
        """Collect the layers of a served model; raises Unsupported if decode.h lacks a part."""
        self._model = model
        self._stored = Panels if model.dtype == torch.float32 else (Packed, Packed8)
        if model.dtype not in kernels.decode:
            raise Unsupported
        self._decode = kernels.decode[model.dtype]
        self._owners: list[object] = []  # of the memory that the addresses point to
        self._linears: list[Linear] = []  # those that may get an adapter
        blocks = [self._layer(cast(OperatorBlock, block)) for block in model.blocks]
        self._layers = (Layer * len(blocks))(*blocks)
        self._last_norm = self._scale(model.model.norm)

    @staticmethod
    def of(kernels: Kernels, model: OperatorQwen) -> "Decoder | None":
        """Return the decoder of a served model, or None if decode.h lacks a part of it."""
        try:
            return Decoder(kernels, model)
        except Unsupported:
            return None

    def __call__(self, idx: Tensor, context: object) -> Tensor | None:  # (B, T) -> (B, T, C)
        """Return what Qwen.hidden() returns, or None if this pass is not one of decoding.

        Each row must have so few new tokens that extend() attends to them one by one, in a cache of
        the model's dtype, and no matrix may have an adapter. Raises IndexError if a token is beyond
        the end of its slot.
        """
        if idx.size(1) >= MANY_QUERIES or not isinstance(context, Cached):
            return None
        if is_compiling() or torch.is_grad_enabled():
            return None
        cache = context.cache
        model = self._model
        if cache.k.dtype != model.dtype or any(matrix.adapter for matrix in self._linears):
            return None
        context.bind(model)
        x = model.embed(idx).contiguous()
        cos, sin = (table.contiguous() for table in model.rotary(context, idx.size(1)))
        cached_k = cache.k[:, context.slots]
        cached_v = cache.v[:, context.slots]
        y = torch.empty_like(x)
        c = model.config
        sizes = Sizes(
            layers=len(self._layers),
            rows=idx.size(0),
            tokens=idx.size(1),
            channels=c.n_embd,
            heads=c.n_head,
            kv_heads=c.n_kv_head,
            size=c.head_dim,
            hidden=c.n_hidden,
            length=cached_k.size(2),
            slot=cached_k.stride(1),
            layer=cached_k.stride(0),
            turns=cos.size(0) * cos.size(1),
        )
        positions = context.positions.T.contiguous()
        fits = self._decode(
            ctypes.addressof(self._layers),
            ctypes.addressof(sizes),
            x.data_ptr(),
            self._last_norm,
            cos.data_ptr(),
            sin.data_ptr(),
            cached_k.data_ptr(),
            cached_v.data_ptr(),
            positions.data_ptr(),
            y.data_ptr(),
            torch.get_num_threads(),
            c.norm_eps,
            c.head_dim**-0.5,
        )
        if not fits:
            raise IndexError(
                f"a slot has {cached_k.size(2):,} positions, and a token is beyond them"
            )
        context.finish()
        return y

    # --- collecting ------------------------------------------------------------------------------

    def _layer(self, block: OperatorBlock) -> Layer:
        """Return the structure of a layer."""
        attention = block.self_attn
        mlp = block.mlp
        if not isinstance(attention, OperatorAttention) or not isinstance(mlp, OperatorMLP):
            raise Unsupported
        c = attention.config
        if c.output_gate or mlp.joined is None:
            raise Unsupported
        self._linears += [attention.q_proj, attention.k_proj, attention.v_proj]
        self._linears += [mlp.gate_proj, mlp.up_proj]
        if attention.joined is not None:
            q = self._stored_matrix(attention.joined.multiply)
            k = v = Matrix()
        else:
            q = self._matrix(attention.q_proj)
            k = self._matrix(attention.k_proj)
            v = self._matrix(attention.v_proj)
        return Layer(
            q=q,
            k=k,
            v=v,
            out=self._matrix(attention.o_proj),
            gate_up=self._stored_matrix(mlp.joined.multiply),
            down=self._matrix(mlp.down_proj),
            first_norm=self._scale(block.input_layernorm),
            second_norm=self._scale(block.post_attention_layernorm),
            head_norms=self._head_norms(attention),
            window=attention.window,
            half=c.rotated // 2 if attention.rotates else 0,
        )

    def _head_norms(self, attention: OperatorAttention) -> int | None:
        """Return the address of the norm weights of all heads, or None if heads are not normed."""
        c = attention.config
        if not c.qk_norm:
            return None
        is_fused = attention.rotates and c.rotated == c.head_dim
        if attention.norm_weights is None or not is_fused:
            raise Unsupported
        return self._address(attention.norm_weights)

    def _scale(self, norm: object) -> int:
        """Return the address of a norm's settled scale."""
        if not isinstance(norm, OperatorNorm) or norm.settled is None:
            raise Unsupported
        return self._address(norm.settled)

    def _matrix(self, linear: Linear) -> Matrix:
        """Return the structure of a matrix with its bias."""
        matrix = self._stored_matrix(linear.multiply)
        self._linears.append(linear)
        if linear.has_bias:
            bias = linear.bias.detach().to(self._model.dtype)  # as Linear casts it
            matrix.bias = self._address(bias.float())
        return matrix

    def _stored_matrix(self, stored: object) -> Matrix:
        """Return the structure of a stored matrix, without a bias."""
        if not isinstance(stored, self._stored) or stored.address is None:
            raise Unsupported
        self._owners.append(stored)
        outputs, inputs = stored.shape
        return Matrix(
            weights=stored.address,
            scales=None if stored.scales is None else self._address(stored.scales),
            format=FORMATS[stored.dtype],
            outputs=outputs,
            inputs=inputs,
        )

    def _address(self, tensor: Tensor) -> int:
        """Return the address of a tensor that stays where it is, because a list refers to it."""
        self._owners.append(tensor)
        return tensor.data_ptr()
