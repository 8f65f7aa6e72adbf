"""Measures the inference engine and the server."""
