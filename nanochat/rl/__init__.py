"""Reinforcement learning on problems whose answers can be checked.

What it gives: sampled replies, their rewards, and the loss that follows from them; chat_rl.py has
the loop. To read, in this order:

rollout.py   samples replies, grades them, and makes weighted rows of them
policy.py    rewards to advantages and weights; the losses of a policy
trees.py     replies as trees: what they have in common is trained once
groups.py    what they have in common is sampled once
anchor.py    the pull toward the model that RL started from
sampler.py   the copy of the model that replies are sampled from
"""
