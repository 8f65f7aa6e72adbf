"""Tests of folders in the layout of Hugging Face."""
