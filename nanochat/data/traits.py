"""The settings that suit a corpus, for the stages that train on it and for chats with its models.

This file does not import pyarrow, since chats read it too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Drawing:
    """The sampling settings of a chat, unless the user asks for others."""

    temperature: float = 0.6
    """The randomness, from 0, which always takes the most likely token, to 2."""
    min_p: float = 0.0
    """Tokens whose probability is below this share of the highest probability are never drawn."""
    reason: Mapping[str, str] = field(default_factory=lambda: {"en": "the default", "zh": "默认值"})
    """The reason for these settings, by language."""


@dataclass(frozen=True)
class Traits:
    """Properties of a corpus that set the defaults of stages and chats.

    The defaults here suit a large corpus of web pages.
    """

    row_tokens: int | None = None
    """Tokens in a row of pretraining if no length is set; if None, the device decides."""
    step_tokens: int | None = None
    """Tokens in a step, over all ranks, if no batch size is set; if None, the length of the run
    decides."""
    pairs: bool = True
    """Whether the model gets a table of embeddings for pairs of tokens if its size is not set."""
    documents_every: int = 0
    """In midtraining, one row in this many comes from the corpus, so that the model does not forget
    it; 0 means none."""
    answers_documents_every: int = 0
    """The same number for fine-tuning, where rows of documents have several times as many targets
    as rows of conversations."""
    chats: Drawing = Drawing()
    """The sampling settings for chats with a model of the corpus."""
    knows: Mapping[str, str] | None = None
    """A list of what a chat model of the corpus knows, by language, for visitors of the page, or
    None if that is unknown."""
    curriculum: Literal["tinyworld", "published"] = "published"
    """The data of the later stages and of the evaluation of chat models: a key of CURRICULA in
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
    """Return the traits of the corpus with this name.

    A mixture, an imported corpus and None (unknown) have the default traits.
    """
    return TINYWORLD if corpus == "tinyworld" else Traits()
