"""Measures the evaluation of base models beside upstream's code and lm-evaluation-harness."""
