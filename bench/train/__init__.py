"""The speed and the memory of pretraining on one CPU thread, and the speed of two ranks."""
