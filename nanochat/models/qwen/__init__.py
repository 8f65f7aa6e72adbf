"""The Qwen models: their shapes, their layers, and the model built from them."""
