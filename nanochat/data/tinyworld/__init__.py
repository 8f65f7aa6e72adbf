"""TinyWorld, the corpus that this package generates; other modules import it from world.py."""
