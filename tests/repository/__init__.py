"""Tests of repository."""
