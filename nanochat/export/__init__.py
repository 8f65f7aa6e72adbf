"""Checkpoints for other programs."""
