"""The chat server beside other servers, and while half of its clients misbehave."""
