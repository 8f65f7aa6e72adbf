"""What several ranks cost on a CPU, and the bytes that they send."""
