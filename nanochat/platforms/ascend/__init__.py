"""Ascend NPUs.

What it gives: training and inference on every chip that torch_npu knows, with the fused operators
that the chip has, and errors of torch_npu, HCCL and the driver in words that say what to do.
To read, in this order:

platform.py     what the project asks of a device, answered for an NPU
chips.py        the chips by SoC version: their memory, number formats and rates
kernels.py      attention, norm and rotary embedding by Ascend's operators
operators.py    the 950, and chips that no table knows: fused operators from a list
environment.py  variables, time-outs and ports of torch_npu and its collectives
errors.py       what errors mean
profiler.py     traces by torch_npu's profiler
"""
