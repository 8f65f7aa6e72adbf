"""Preparing and loading rows, evaluating a model, and saving its checkpoints."""
