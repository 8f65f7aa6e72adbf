"""What one rank holds of a step: copied to the host, written beside training, in one file or one per rank, and read."""
