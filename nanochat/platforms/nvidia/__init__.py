"""NVIDIA GPUs.

What it gives: attention with windows by the fastest library that is there, and products in FP8. To
read, in this order:

platform.py     what the project asks of a device, answered for a GPU
attention.py    which library attends, and for which head dimensions
flash4.py       FlashAttention 4
fp8.py          products in FP8
"""
