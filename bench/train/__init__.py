"""Training speed on one CPU thread, and what short runs learn, beside upstream."""
