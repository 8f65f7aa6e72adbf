"""Reinforcement learning: replies sampled from the current model, their rewards, and the loss that they give."""
