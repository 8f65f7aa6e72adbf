"""Exports checkpoints for other programs."""
