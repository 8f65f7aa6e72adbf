"""Measures what clients of the chat server feel while other clients misbehave."""
