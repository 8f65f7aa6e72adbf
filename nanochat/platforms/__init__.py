"""One file per vendor: what its devices do their own way."""
