"""Tests of nanochat/generate/schema."""
