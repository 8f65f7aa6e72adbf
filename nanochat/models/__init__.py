"""Published families of models, which are fine-tuned, served and exported.

What it gives: Qwen1.5 to 3.5 (dense), Qwen3 also trained from nothing, and low-rank adapters. To
read, in this order:

qwen/config.py     the shapes of all versions
qwen/layers.py     vocabulary, norm, attention, MLP, block; functions.py has their arithmetic
qwen/model.py      the model, with the members that model.py asks of every family
qwen/deltanet.py   Gated DeltaNet, the recurrent layers of Qwen3.5
qwen/int8.py       matrices in 8 bits for CPUs
lora.py            adapters
"""
