"""NVIDIA GPUs: the platform, attention by the fastest library that is there, and products in FP8."""
