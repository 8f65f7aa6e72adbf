"""Evaluations: bits per byte, CORE, chat tasks, and the sandbox for programs that a model wrote."""
