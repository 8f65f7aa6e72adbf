"""The pictures of the README: small and complete."""

from dev import pictures


def test_the_pictures_are_there_and_small() -> None:
    names = {file.name for file in pictures.FOLDER.iterdir()}
    assert names == {
        f"{name}{theme.suffix}.png"
        for name in ("chat", "compare", "curves", "runs", "tokenizer")
        for theme in pictures.THEMES
    }
    assert pictures.size() <= pictures.MOST_BYTES
