"""Tests of tools_npu."""
