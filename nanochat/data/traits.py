"""The settings that suit a corpus, for the stages that train on it and for chats with its models.

Chats import this module too, so it does not import pyarrow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Drawing:
    """The default sampling settings of a chat."""

    temperature: float = 0.6
    """The randomness, from 0 (always the most likely token) to 2."""
    min_p: float = 0.0
    """Tokens whose probability is below this share of the highest probability are never drawn."""
    top_k: int = 50
    """The number of most likely tokens that are drawn from; 0 means all."""
    top_p: float = 1.0
    """The probability that the most likely tokens that are drawn from reach together."""
    repetition_penalty: float = 1.0
    """The factor by which tokens that were read or written become less likely; 1 means none."""
    reason: Mapping[str, str] = field(default_factory=lambda: {"en": "the default", "zh": "默认值"})
    """The reason for these settings, by language."""


@dataclass(frozen=True)
class Traits:
    """Properties of a corpus that set the defaults of stages and chats.

    The values below suit a large corpus of web pages.
    """

    row_tokens: int | None = None
    """The default length of a row in pretraining in tokens; if None, the device decides."""
    step_tokens: int | None = None
    """The default number of tokens in a step of pretraining, over all ranks; if None, it depends on
    the length of the run, if that is known."""
    pairs: bool = True
    """Whether a model has a table of embeddings for pairs of tokens by default."""
    documents_every: int = 0
    """N if every N-th row of midtraining is to come from the corpus, so that the model does not
    forget it; 0 means none."""
    answers_documents_every: int = 0
    """Like `documents_every`, but for fine-tuning, where rows of documents have several times as
    many targets as rows of conversations."""
    chats: Drawing = Drawing()
    """The sampling settings for chats with a model trained on the corpus."""
    knows: Mapping[str, str] | None = None
    """What a chat model trained on the corpus knows, as a phrase for the chat page in each
    language, or None if that is unknown."""
    curriculum: Literal["tinyworld", "published"] = "published"
    """The data for the later stages and for evaluating chat models, as a key of CURRICULA in
    tasks.mixtures."""


TINYWORLD = Traits(
    row_tokens=256,
    step_tokens=8192,
    # A model that learns pairs of tokens from few sentences understands other wordings less well.
    pairs=False,
    documents_every=4,
    answers_documents_every=8,
    chats=Drawing(
        temperature=1.0,
        min_p=0.5,
        reason={
            "en": "a TinyWorld model knows facts by its likeliest words only, and varies its "
            "stories among them",
            "zh": "TinyWorld 模型很小，只有概率最高的几个词可靠，故事的变化就来自这几个词",
        },
    ),
    knows={
        "en": "capitals and landmarks, animals and plants, colours, shapes, opposites, the "
        "calendar, planets, jobs, everyday things, spelling, sums, and short stories about animals "
        "and things",
        "zh": "各国首都和名胜、动物和植物、颜色、形状、反义词、日期和节日、行星、职业、"
        "日常用品、单词拼写、算术，还有动物和物品的小故事",
    },
    curriculum="tinyworld",
)


def traits(corpus: str | None) -> Traits:
    """Return the traits of the corpus called `corpus`.

    These are the defaults for every corpus except TinyWorld, and for None (unknown).
    """
    return TINYWORLD if corpus == "tinyworld" else Traits()
