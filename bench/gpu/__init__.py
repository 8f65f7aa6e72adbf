"""The speed of pretraining on one accelerator, beside upstream."""
