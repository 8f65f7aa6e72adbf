"""Measures fine-tuning of published models beside transformers and peft."""
