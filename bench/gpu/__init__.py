"""Training speed on one accelerator beside upstream."""
