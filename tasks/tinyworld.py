"""TinyWorld's measures as tasks: open questions in both languages, the calculator, and mental sums."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nanochat.data.conversation import Conversation, Part
from nanochat.data.tinyworld import world as tinyworld


@dataclass(frozen=True)
class TinyWorld:
    """A named list of TinyWorld's problems. A reply is right if it gives the right value and no other value."""

    name: str
    problems: Sequence[tinyworld.Problem]
    kind: Literal["generative"] = "generative"

    @property
    def drawn(self) -> bool:
        """Whether replies are to be drawn as a chat draws them: the likeliest words tell the same story each time."""
        return any(problem.tale for problem in self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, i: int) -> Conversation:
        return self.problems[i].conversation

    def letters(self, i: int) -> tuple[str, ...]:
        """No letters, since the questions are open."""
        return ()

    def group(self, i: int) -> str:
        """The relation that problem i asks about; reports give figures per relation."""
        return self.problems[i].relation

    def grade(self, i: int, reply: str | Sequence[Part]) -> float:
        """1 if the value is right, else 0. For problems of the calculator, pass the parts of the reply, since a right
        reply has called the calculator."""
        return float(tinyworld.grade(self.problems[i], reply))

    grade_parts = grade


def measures(seed: int = 0) -> dict[str, Callable[[], TinyWorld]]:
    """Functions that make the measures, by name: held-out wordings, the calculator, held-out combinations, unknown
    things, questions about stories, follow-up questions, stories on request, questions about nanochat itself, and the
    mental sums of RL."""
    made: dict[str, Callable[[], Sequence[tinyworld.Problem]]] = {}
    for lang in tinyworld.LANGUAGES:
        made[f"tinyworld_{lang}"] = partial(tinyworld.evaluation, lang, seed)
    made["calculator"] = partial(tinyworld.calculator_evaluation, seed)
    for lang in tinyworld.LANGUAGES:
        made[f"held_out_combinations_{lang}"] = partial(tinyworld.held_out_combinations, lang, seed)
        made[f"unknown_{lang}"] = partial(tinyworld.unknown_evaluation, lang, seed)
        made[f"stories_{lang}"] = partial(tinyworld.story_evaluation, lang, seed)
        made[f"follow_ups_{lang}"] = partial(tinyworld.follow_up_evaluation, lang, seed)
        made[f"storytelling_{lang}"] = partial(tinyworld.tale_evaluation, lang, seed)
        made[f"persona_{lang}"] = partial(tinyworld.persona_evaluation, lang, seed)
    made["mental"] = partial(tinyworld.rl_evaluation, seed)
    return {name: partial(_make, name, problems) for name, problems in made.items()}


def _make(name: str, problems: Callable[[], Sequence[tinyworld.Problem]]) -> TinyWorld:
    return TinyWorld(name, problems())


def mental(
    seed: int = 0, difficulty: tinyworld.Mental | None = None, unseen: bool = False
) -> TinyWorld:
    """Mental sums in held-out wordings, which measure RL. With `unseen`, no training ever adds the same terms."""
    name = "mental_unseen" if unseen else "mental"
    return TinyWorld(name, tinyworld.rl_evaluation(seed, mental=difficulty, unseen=unseen))
