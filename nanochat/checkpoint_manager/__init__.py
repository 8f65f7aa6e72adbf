"""Checkpoints: found, written, read, resumed and taken over from upstream."""
