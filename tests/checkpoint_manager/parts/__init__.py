"""Tests of what one rank holds of a step: copied, written, read."""
