"""Shows training while it happens: the runs under a base folder, their figures and samples."""
