"""TinyWorld: a small bilingual world of true facts, its documents, conversations and questions."""

from nanochat.tinyworld.arithmetic import Mental
from nanochat.tinyworld.conversations import mid_conversations, sft_conversations
from nanochat.tinyworld.dialogues import identity_conversations
from nanochat.tinyworld.documents import documents
from nanochat.tinyworld.problems import (
    Problem,
    calculator_evaluation,
    evaluation,
    grade,
    held_out_combinations,
    rl_evaluation,
    rl_problems,
    story_evaluation,
    unknown_evaluation,
)
from nanochat.tinyworld.words import LANGUAGES, Language

__all__ = [
    "LANGUAGES",
    "Language",
    "Mental",
    "Problem",
    "calculator_evaluation",
    "documents",
    "evaluation",
    "grade",
    "held_out_combinations",
    "identity_conversations",
    "mid_conversations",
    "rl_evaluation",
    "rl_problems",
    "sft_conversations",
    "story_evaluation",
    "unknown_evaluation",
]
