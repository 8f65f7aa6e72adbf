"""Traits of corpora: TinyWorld is small and factual, every other corpus takes the defaults."""

import pytest

from nanochat.data.traits import Drawing, Traits, traits


@pytest.mark.parametrize("corpus", ["fineweb", "mine", "tinyworld:7,fineweb:3", "TinyWorld", "", None])
def test_every_other_corpus_and_every_mixture_has_the_default_traits(corpus: str | None) -> None:
    assert traits(corpus) == Traits(row_tokens=None, step_tokens=None, pairs=True, documents_every=0, chats=Drawing(),
                                    knows=None, curriculum="published")  # fmt: skip
