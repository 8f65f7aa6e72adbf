"""The speed and the memory of fine-tuning published models, beside transformers and peft."""
