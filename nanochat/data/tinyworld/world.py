"""TinyWorld: a small bilingual world of true facts, with documents, conversations and questions about it."""

from nanochat.data.tinyworld.arithmetic import Mental
from nanochat.data.tinyworld.conversations import mid_conversations, sft_conversations
from nanochat.data.tinyworld.dialogues import identity_conversations
from nanochat.data.tinyworld.documents import documents
from nanochat.data.tinyworld.problems import (
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
from nanochat.data.tinyworld.words import LANGUAGES, Language

# Names the text that TinyWorld makes: corpora and token files of another version are made again. Change it whenever
# a document, conversation or question changes; tests/data/test_tinyworld_version.py notices when that was forgotten.
VERSION = "fc94f942c56b23c4a6fcf36cc2899b646fae6e5cfe0b9187d5068f1db5f1e8a5"

__all__ = [
    "LANGUAGES",
    "VERSION",
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
