"""Reinforcement learning on problems whose answers can be checked.

The package samples replies, rewards them, and computes the loss that follows from the rewards. The
training loop is in chat_rl.py. Read the files in this order:

rollout.py   samples replies, grades them, and turns them into training batches
rewards.py   rewards replies by your own functions, which run in the sandbox (reward_child.py)
policy.py    turns rewards into advantages and weights; the policy losses
trees.py     trains on replies as trees, so that shared beginnings are computed once
groups.py    samples replies as trees, for the same reason
anchor.py    pulls the weights back towards the model that RL started from
sampler.py   the copy of the model that replies are sampled from
start.py     opens the published or fine-tuned model that RL starts from
"""
