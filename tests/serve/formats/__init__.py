"""Tests of nanochat.serve.routes."""
