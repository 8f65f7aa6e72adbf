"""Published model families that can be fine-tuned, served and exported.

The package holds one decoder with the options of all families, and low-rank adapters. The decoder
began as the Qwen models, dense and with experts (dense Qwen3 can also be trained from scratch).
Read the files in this order:

qwen/config.py       the shapes of models and their options
rope.py              rotary frequencies for long contexts
qwen/layers.py       vocabulary, norm, attention, MLP and block; functions.py has their arithmetic
qwen/model.py        the model, with the members that model.py requires of every family
qwen/deltanet.py     Gated DeltaNet, the recurrent layers of Qwen3.5; delta_rule.py has its memory
qwen/experts.py      mixtures of experts, which replace MLPs
qwen/int8.py         8-bit matrices for CPUs
qwen/pretraining.py  the shape of a Qwen3 to pretrain
llama.py             the Llama models, as a variant of Qwen
lora.py              low-rank adapters
"""
