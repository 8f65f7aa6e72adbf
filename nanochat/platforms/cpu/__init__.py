"""Training and inference on CPUs.

The package has C++ kernels for inference and training, which each machine compiles for itself, and
8-bit matrices for training. Without a compiler, everything runs in plain torch. Its files, in
reading order:

platform.py     implements the Platform interface for the host
operations.py   the operators that faster layers call
kernels.py      compiles the C++ sources in cpp/, and calls the functions for inference
training.py     calls the functions for training
gradients.py    registers the functions for training with autograd
products.py     multiplies in training, in the format of the activations or in 8 bits
int8.py         makes a GPT train with 8-bit products
stored.py       stores the matrices of a model that is served, in oneDNN's layout or in panels
panels.py       multiplies fp32 activations by matrices of fp32, bf16 or 8-bit numbers
decoding.py     computes masked attention as matrix products
"""
