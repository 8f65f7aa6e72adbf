"""Tests of nanochat.serve.routes.responses."""
