"""Finds how large a pass fits into a device's memory, and how much disk space a run takes."""
