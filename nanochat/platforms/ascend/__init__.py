"""Training and inference on Ascend NPUs.

The package supports every chip that torch_npu knows, uses the fused operators that the chip has,
and explains errors of torch_npu, HCCL and the driver, with advice on what to do. Its files, in
reading order:

platform.py     implements the Platform interface for NPUs
chips.py        lists the chips by SoC version: their memory, number formats and rates
kernels.py      computes attention, norms and rotary embeddings with Ascend's operators
operators.py    selects fused operators one by one, for the 950, the 310B and unknown chips
environment.py  sets the variables, time-outs and ports of torch_npu and its collectives
errors.py       explains errors
profiler.py     records traces with torch_npu's profiler
"""
