"""Tests of rustbpe."""
