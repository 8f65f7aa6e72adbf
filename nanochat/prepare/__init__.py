"""Corpora and conversations as token files, and the plan of which piece stands in which row."""
