"""Training seen live: the runs under the base folder, their figures, and the routes that tell a
browser of them."""
