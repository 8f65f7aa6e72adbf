"""Answers POST /v1/messages and /v1/messages/count_tokens, in the format of Anthropic's API."""
