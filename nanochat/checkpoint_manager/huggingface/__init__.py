"""Folders in the layout of Hugging Face: published models with their tokenizers and templates, and adapters."""
