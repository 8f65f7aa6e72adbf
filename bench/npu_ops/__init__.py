"""Operators that one training step launches on an NPU."""
