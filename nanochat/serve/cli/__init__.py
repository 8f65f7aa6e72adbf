"""The chat in a terminal: what chat_cli shows, reads and keeps, and its talk with a server."""
