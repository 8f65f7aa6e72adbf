"""Reinforcement learning: sampled replies, their rewards, and the loss that they give.

Read rollout.py first, then policy.py (rewards to weights, losses), trees.py and groups.py (what replies
have in common is computed once), anchor.py (the pull towards the model that RL started from).
"""
