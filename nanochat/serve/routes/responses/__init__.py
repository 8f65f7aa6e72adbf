"""/v1/responses, OpenAI's newer format: its requests, its replies, and the stored responses."""
