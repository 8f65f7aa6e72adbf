"""The parts of generation that need no model: sampling, and turning tokens into text and calculator calls."""
