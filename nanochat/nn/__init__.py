"""Building blocks of models, the same on every device."""
