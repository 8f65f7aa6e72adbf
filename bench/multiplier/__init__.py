"""Compute multipliers: how much more a baseline must spend to reach our loss."""
