"""NVIDIA GPUs: the platform, and attention by the fastest library that is there."""
