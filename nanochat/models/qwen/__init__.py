"""The Qwen models: their shapes, layers and the model that joins them."""
