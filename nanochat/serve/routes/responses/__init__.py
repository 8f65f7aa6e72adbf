"""/v1/responses, OpenAI's newer format: requests, the items of inputs and replies, and what is kept
of them."""
