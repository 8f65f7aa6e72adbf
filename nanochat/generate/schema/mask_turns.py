"""Limits the time that a step of the engine spends on the masks of schemas, so that other replies go on meanwhile."""

from collections.abc import Sequence

from nanochat.generate.schema.grammar import Grammar

STEP_SECONDS = 0.002  # for the masks of a step in which replies without a schema are waiting
ALONE_SECONDS = 0.05  # in which every reply has a schema
PATIENCE = 200  # steps after which the reply with a costly schema waits no longer behind cheap ones


class MaskTurns:
    """Chooses the replies whose masks are computed in a step.

    A mask cannot be interrupted, so a step may exceed its time, and then later steps get less. Schemas with cheap
    masks come first, whoever has waited longest before the others. Costly ones follow in the order of their arrival:
    one after the other ends its reply or reaches its limit, and they do not all grow at the same time.
    """

    def __init__(self) -> None:
        self._left = 0.0  # seconds; negative after a step that took longer

    def take(self, grammars: Sequence[Grammar | None]) -> dict[int, bytes]:
        """The masks of the rows that take part in this step, by row. Every other row with a grammar has to wait.

        If all rows have grammars, one of them takes part at least.
        """
        ruled = [(row, grammar) for row, grammar in enumerate(grammars) if grammar is not None]
        alone = len(ruled) == len(grammars)
        share = ALONE_SECONDS if alone else STEP_SECONDS
        self._left = min(self._left + share, share)
        masks: dict[int, bytes] = {}
        for row, grammar in sorted(ruled, key=lambda pair: _place(pair[1])):
            if self._left <= 0 and (masks or not alone):
                grammar.waited += 1
                continue
            before = grammar.seconds
            masks[row] = grammar.allowed()
            self._left -= grammar.seconds - before
            grammar.waited = 0
        return masks


def _place(grammar: Grammar) -> tuple[bool, int]:
    costly = grammar.costly and grammar.waited < PATIENCE
    return costly, grammar.number if costly else -grammar.waited
