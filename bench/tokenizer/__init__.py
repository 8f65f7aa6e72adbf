"""Training and encoding with the tokenizer, beside karpathy/rustbpe, Hugging Face tokenizers and tiktoken."""
