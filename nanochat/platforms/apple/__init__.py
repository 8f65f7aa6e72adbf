"""Training and inference on the GPU of a Mac with Apple silicon, which torch calls MPS.

Nobody has run this package on a Mac. A test checks what it calls against torch's published wheel.

platform.py     implements the Platform interface for the GPU
"""
