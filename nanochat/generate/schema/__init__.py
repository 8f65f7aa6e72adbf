"""Keeps replies inside JSON schemas, however much work a schema asks for."""
