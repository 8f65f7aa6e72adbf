"""Limits the time that an engine step spends on schema masks, so that other replies go on."""

from collections.abc import Sequence

from nanochat.generate.schema.grammar import Grammar

# The time for a step's masks: if replies without a schema wait, or if every reply has a schema.
STEP_SECONDS = 0.002
ALONE_SECONDS = 0.05
PATIENCE = 200  # steps after which a reply with costly masks no longer waits behind the others


class MaskTurns:
    """Chooses the replies whose masks are computed in each step.

    A mask cannot be interrupted, so a step may exceed its time, and then later steps get less.
    Replies with cheap masks come first, longest wait first, and with them any reply that has waited
    for 200 steps. The others follow in the order of their arrival, so that each in turn ends or
    reaches its limit, and their automata do not all grow at the same time.
    """

    def __init__(self) -> None:
        self._seconds_left = 0.0  # negative after a step that took longer

    def take(self, grammars: Sequence[Grammar | None]) -> dict[int, bytes]:
        """Return the masks of the rows that take part in this step, by row.

        Other rows with a grammar have to wait. If all rows have grammars, at least one takes part.
        """
        rows = [(row, grammar) for row, grammar in enumerate(grammars) if grammar is not None]
        all_have_grammars = len(rows) == len(grammars)
        share = ALONE_SECONDS if all_have_grammars else STEP_SECONDS
        self._seconds_left = min(self._seconds_left + share, share)
        masks: dict[int, bytes] = {}
        for row, grammar in sorted(rows, key=lambda pair: _priority(pair[1])):
            must_take_one = all_have_grammars and not masks
            if self._seconds_left <= 0 and not must_take_one:
                grammar.waited += 1
                continue
            seconds_before = grammar.seconds
            masks[row] = grammar.allowed()
            self._seconds_left -= grammar.seconds - seconds_before
            grammar.waited = 0
        return masks


def _priority(grammar: Grammar) -> tuple[bool, int]:
    """Return a key that sorts grammars in the order of their turns."""
    costly = grammar.costly and grammar.waited < PATIENCE
    return costly, grammar.number if costly else -grammar.waited
