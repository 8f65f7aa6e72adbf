"""The terminal chat: what chat_cli shows, reads and keeps, and how it talks to a server."""
