"""Measures: bits per byte, CORE, tasks, and the sandbox for programs that a model wrote."""
