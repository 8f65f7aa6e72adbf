"""What a corpus asks of the stages that train on it, by its name; without pyarrow, since chats read it too."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Drawing:
    """How a chat draws the words of its replies where nobody asked for anything else."""

    temperature: float = 0.6
    """Randomness, from 0, the likeliest token always, to 2."""
    min_p: float = 0.0
    """Tokens less likely than this share of the likeliest one are never drawn."""
    reason: Mapping[str, str] = field(default_factory=lambda: {"en": "the default", "zh": "默认值"})
    """Why, by language."""


@dataclass(frozen=True)
class Traits:
    """Properties of a corpus that the stages and chats go by. The defaults suit a large corpus of web pages."""

    row_tokens: int | None = None
    """Tokens of a row in pretraining where no length was asked for; None: the device decides."""
    step_tokens: int | None = None
    """Tokens of a step, over all ranks, where no batch size was asked for; None: the length of the run decides."""
    pairs: bool = True
    """Whether a table of embeddings for pairs of tokens helps where its size was left open."""
    documents_every: int = 0
    """In midtraining one row in so many comes from the corpus, so that the model does not forget it; 0: none."""
    answers_documents_every: int = 0
    """The same in fine-tuning, where rows of documents have several times as many targets as rows of conversations."""
    chats: Drawing = Drawing()
    """How chats with a model of the corpus draw their words."""
    knows: Mapping[str, str] | None = None
    """What a chat model of the corpus knows, for those who meet it on the page, by language; None: nobody can say."""
    curriculum: Literal["tinyworld", "published"] = "published"
    """What the later stages learn from and what chat models are measured on: a key of CURRICULA in tasks.mixtures."""


TINYWORLD = Traits(
    row_tokens=256,
    step_tokens=8192,
    pairs=False,  # a model that knows the pairs of few sentences understands other wordings of them less
    documents_every=4,
    answers_documents_every=8,
    chats=Drawing(
        temperature=1.0,
        min_p=0.5,
        reason={
            "en": "a TinyWorld model knows facts by its likeliest words only, and varies its stories among them",
            "zh": "TinyWorld 模型很小，只有概率最高的几个词可靠，故事的变化就来自这几个词",
        },
    ),
    knows={
        "en": "capitals and landmarks, animals and plants, colours, shapes, opposites, the calendar, planets, jobs, "
        "everyday things, spelling, sums, and short stories about animals and things",
        "zh": "各国首都和名胜、动物和植物、颜色、形状、反义词、日期和节日、行星、职业、日常用品、单词拼写、算术，"
        "还有动物和物品的小故事",
    },
    curriculum="tinyworld",
)


def traits(corpus: str | None) -> Traits:
    """The traits of a corpus by its name. A mixture, an imported corpus and None (unknown) have the default traits."""
    return TINYWORLD if corpus == "tinyworld" else Traits()
