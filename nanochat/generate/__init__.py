"""Pieces of generation that need no model: sampling, and replies as text and tool calls."""
