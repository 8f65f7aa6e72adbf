"""Traits of corpora: TinyWorld is small and factual, every other corpus takes the defaults."""

import pytest

from nanochat.data.traits import Drawing, Traits, traits


def test_tinyworld_has_short_rows_small_steps_and_its_own_curriculum() -> None:
    found = traits("tinyworld")
    assert (found.row_tokens, found.step_tokens, found.documents_every) == (256, 8192, 4)
    assert found.answers_documents_every == 8 and not found.pairs
    assert found.curriculum == "tinyworld"
    assert (found.chats.temperature, found.chats.min_p) == (1.0, 0.5)
    assert set(found.chats.reason) == {"en", "zh"}


@pytest.mark.parametrize("corpus", ["fineweb", "mine", "tinyworld:7,fineweb:3", "TinyWorld", "", None])
def test_every_other_corpus_and_every_mixture_has_the_default_traits(corpus: str | None) -> None:
    assert traits(corpus) == Traits(row_tokens=None, step_tokens=None, pairs=True, documents_every=0, chats=Drawing(),
                                    knows=None, curriculum="published")  # fmt: skip
