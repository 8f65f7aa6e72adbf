"""Predicts speed, memory and disk of pretraining before a run starts, and plans the flags for it."""
