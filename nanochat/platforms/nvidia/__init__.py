"""Training and inference on NVIDIA GPUs.

The package computes windowed attention with the fastest library that is installed, and training
products in FP8. Its files, in reading order:

platform.py     implements the Platform interface for GPUs
attention.py    chooses the attention library, and the inputs for which it is used
flash4.py       wraps FlashAttention 4 as operators of torch
fp8.py          multiplies in FP8
"""
