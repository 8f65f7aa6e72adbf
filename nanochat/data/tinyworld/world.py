"""TinyWorld: a small bilingual world of true facts, with texts, conversations and questions.

Other packages import TinyWorld from here.
"""

from nanochat.data.tinyworld.arithmetic import Mental
from nanochat.data.tinyworld.conversations import mid_conversations, sft_conversations
from nanochat.data.tinyworld.documents import documents
from nanochat.data.tinyworld.problems import (
    Problem,
    calculator_evaluation,
    evaluation,
    grade,
    held_out_combinations,
    persona_evaluation,
    rl_evaluation,
    rl_problems,
    story_evaluation,
    tale_evaluation,
    unknown_evaluation,
)
from nanochat.data.tinyworld.talks.dialogues import identity_conversations
from nanochat.data.tinyworld.talks.followups import follow_up_evaluation
from nanochat.data.tinyworld.words import LANGUAGES, Language

# Identifies the text of TinyWorld: corpora and token files of another version are made again.
# Change it whenever a document, conversation or question changes;
# tests/data/test_tinyworld_version.py fails if that was forgotten.
VERSION = "f7ce7ad97ec9839ba80bed8321b1dda74459c526b325f721b3d858a6f08b5f52"

__all__ = [
    "LANGUAGES",
    "VERSION",
    "Language",
    "Mental",
    "Problem",
    "calculator_evaluation",
    "documents",
    "evaluation",
    "follow_up_evaluation",
    "grade",
    "held_out_combinations",
    "identity_conversations",
    "mid_conversations",
    "persona_evaluation",
    "rl_evaluation",
    "rl_problems",
    "sft_conversations",
    "story_evaluation",
    "tale_evaluation",
    "unknown_evaluation",
]
