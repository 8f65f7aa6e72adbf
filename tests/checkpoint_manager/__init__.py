"""Tests of checkpoint_manager."""
