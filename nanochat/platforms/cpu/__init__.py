"""CPUs.

What it gives: C++ kernels for inference and training that the machine compiles for itself, and 8
bits for decoding. Without a compiler everything runs in plain torch. To read, in this order:

platform.py     what the project asks of a device, answered for a host
operations.py   the operators that faster layers call
kernels.py      compiles the C++ of cpp/, and calls what inference needs of it
training.py     calls what training needs of it; gradients.py makes it known to autograd
products.py     products of training, in the format of the activations or in 8 bits
int8.py         lets a GPT train with products in 8 bits
decoding.py     attention of few new tokens as products of matrices
"""
