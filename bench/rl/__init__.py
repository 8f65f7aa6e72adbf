"""What a step of reinforcement learning costs, and whether the rewards teach."""
