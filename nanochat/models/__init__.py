"""Published families of models.

Read qwen/config.py for the shapes first, then qwen/layers.py and qwen/model.py.
"""
