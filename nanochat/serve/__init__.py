"""The chat server, its page, and the two sides of a chat in a terminal."""
