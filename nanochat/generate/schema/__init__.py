"""Keeps replies within JSON schemas, and refuses schemas that take too much work."""
