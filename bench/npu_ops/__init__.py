"""The operators and the bytes of a training step on the emulated NPU."""
