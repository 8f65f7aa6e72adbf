"""What takes several sentences or turns: dialogues, follow-up questions, and stories that are told on request."""
