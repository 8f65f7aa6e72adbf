"""Tests of nanochat.serve.runs."""
