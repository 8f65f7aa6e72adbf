"""The chat server with its web page, and input and output of the terminal chat."""
