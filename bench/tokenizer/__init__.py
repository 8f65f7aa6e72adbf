"""Training and encoding speed of the tokenizer beside its peers."""
