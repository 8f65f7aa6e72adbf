"""Preparing and loading rows, evaluating a model, and saving a checkpoint, each beside its peers."""
