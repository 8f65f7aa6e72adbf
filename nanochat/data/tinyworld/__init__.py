"""TinyWorld, the embedded corpus; world.py is its front."""
