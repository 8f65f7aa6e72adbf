"""The parts of nanochat that depend on the device, with one folder for each vendor.

The model, the loss and the optimizer are plain torch and complete without this folder. A platform
replaces classes of a model with faster ones that have the same parameters, and also replaces
attention and Muon's arithmetic. Read the files in this order:

base.py         the interface that the rest of the project uses, with defaults
host.py         the host's processor and system, which every device depends on
plain.py        the host as a device, in plain torch, which is always available
operations.py   the operators that faster layers call, in plain torch
layers.py       the GPT's faster layers, and accelerate(), which swaps them in
qwen_layers.py  the same for Qwen models
cpu/, nvidia/, ascend/, apple/    the vendors, any of which may be removed
together.py     casts, moves or multiplies by several matrices at once
few_launches.py, blocked_attention.py, muon.py    arithmetic for devices with costly launches
child.py        runs untrusted programs in a process of their own
"""
