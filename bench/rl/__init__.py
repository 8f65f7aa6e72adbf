"""What a step of RL costs, part by part."""
