"""How much of a step fits into the memory of a device, and how much disk a run takes."""
