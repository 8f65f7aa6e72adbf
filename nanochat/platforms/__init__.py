"""What devices do their own way: one folder for each vendor.

The model, the loss and the optimizer are plain torch and complete without this folder. A platform
replaces classes of a model by faster ones with the same parameters, attention by a bundle of four
entries, and Muon's arithmetic. To read, in this order:

base.py         what the rest of the project asks of a device, with defaults
host.py         the processor and system that every device has beside it
plain.py        the host as a device, in plain torch: what is always there
operations.py   the operators that faster layers call, in plain torch
layers.py       the GPT's faster layers, and accelerate(), which swaps them in; qwen_layers.py
cpu/, nvidia/, ascend/    the vendors; each may be torn out
together.py     matrices cast, stepped or multiplied with at once
few_launches.py, blocked_attention.py, muon.py    arithmetic for devices with dear launches
child.py        someone else's program in a process of its own
"""
