"""Tests of bench.train."""
