"""Tests of nanochat/report/."""
