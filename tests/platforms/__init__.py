"""Tests of platforms."""
