"""TinyWorld's evaluations as tasks.

They cover questions and stories in English and Chinese, the calculator, and mental sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from nanochat.data.conversation import Conversation, Part
from nanochat.data.tinyworld import world as tinyworld

Problems = Sequence[tinyworld.Problem]


@dataclass(frozen=True)
class TinyWorld:
    """A named list of TinyWorld's problems."""

    name: str
    problems: Problems
    kind: Literal["generative"] = "generative"

    @property
    def drawn(self) -> bool:
        """Whether replies are sampled, as in a chat, instead of decoded greedily.

        Stories need this, because greedy decoding would tell the same story each time.
        """
        return any(problem.tale for problem in self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, i: int) -> Conversation:
        return self.problems[i].conversation

    def letters(self, i: int) -> tuple[str, ...]:
        """Return no letters, because the questions have no choices."""
        return ()

    def group(self, i: int) -> str:
        """Return the relation that problem i asks about, by which reports group the scores."""
        return self.problems[i].relation

    def grade(self, i: int, reply: str | Sequence[Part]) -> float:
        """Return 1 if the reply is right by the rules of tinyworld.grade(), else 0.

        For problems of the calculator, pass the parts of the reply, because a right reply must have
        called the calculator.
        """
        return float(tinyworld.grade(self.problems[i], reply))

    grade_parts = grade


def measures(seed: int = 0) -> dict[str, Callable[[], TinyWorld]]:
    """Return functions that make the tasks of the evaluations, by name.

    The evaluations are held-out wordings, the calculator, held-out combinations, unknown things,
    questions about stories, follow-up questions, stories on request, questions about nanochat
    itself, and the mental sums of RL.
    """
    problems: dict[str, Callable[[], Problems]] = {}
    for language in tinyworld.LANGUAGES:
        problems[f"tinyworld_{language}"] = partial(tinyworld.evaluation, language, seed)
    problems["calculator"] = partial(tinyworld.calculator_evaluation, seed)
    by_language = {
        "held_out_combinations": tinyworld.held_out_combinations,
        "unknown": tinyworld.unknown_evaluation,
        "stories": tinyworld.story_evaluation,
        "follow_ups": tinyworld.follow_up_evaluation,
        "storytelling": tinyworld.tale_evaluation,
        "persona": tinyworld.persona_evaluation,
    }
    for language in tinyworld.LANGUAGES:
        for name, make in by_language.items():
            problems[f"{name}_{language}"] = partial(make, language, seed)
    problems["mental"] = partial(tinyworld.rl_evaluation, seed)
    return {name: partial(_make_task, name, make) for name, make in problems.items()}


def _make_task(name: str, make: Callable[[], Problems]) -> TinyWorld:
    return TinyWorld(name, make())


def mental(
    seed: int = 0,
    difficulty: tinyworld.Mental | None = None,
    unseen: bool = False,
) -> TinyWorld:
    """Return the task that measures RL: mental sums in held-out wordings.

    If `unseen` is set, the sums are never asked in training; otherwise they are practised sums.
    """
    name = "mental_unseen" if unseen else "mental"
    return TinyWorld(name, tinyworld.rl_evaluation(seed, mental=difficulty, unseen=unseen))
