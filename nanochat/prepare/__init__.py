"""Corpora and conversations as token files, and the plan that packs them into rows."""
