"""Training and encoding with the tokenizer, beside other tokenizers."""
