"""Tests of nn."""
