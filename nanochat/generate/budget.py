"""How many tokens of prompts the engine reads in a step, so that running replies do not stall."""

FEWEST_TOKENS = 16  # fewest prompt tokens to read in a step with running replies


class PromptBudget:
    """Adapts the number of prompt tokens in a step to the time that running replies may wait.

    If reading prompts delays a step by more than `most_seconds`, later steps read half as many
    tokens, but at least 16 (FEWEST_TOKENS); if it takes less than a quarter of that time, twice as
    many, but at most `most_tokens`. Without `most_seconds` the budget stays at `most_tokens`.
    """

    def __init__(self, most_tokens: int, most_seconds: float | None):
        self.tokens = most_tokens
        self._most_tokens = most_tokens
        self._most_seconds = most_seconds
        self._decode_seconds = 0.0  # time of the last step that read no prompt

    def note_step(self, seconds: float, prompts_read: bool) -> None:
        """Adapt the budget to a step with running replies that took `seconds`."""
        if prompts_read:
            self._adapt(seconds - self._decode_seconds)
        else:
            self._decode_seconds = seconds

    def _adapt(self, seconds: float) -> None:
        """Halve or double the budget, after reading prompts took `seconds`."""
        if self._most_seconds is None:
            return
        if seconds > self._most_seconds:
            self.tokens = max(FEWEST_TOKENS, self.tokens // 2)
        elif seconds < self._most_seconds / 4:
            self.tokens = min(self._most_tokens, 2 * self.tokens)
