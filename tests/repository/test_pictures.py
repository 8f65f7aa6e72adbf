"""The pictures of the README and of the guides: small and complete."""

import pytest

from bench.multiplier import ladder
from bench.multiplier.ladder import Record
from dev import ladder_picture, pictures


def test_the_pictures_are_there_and_small() -> None:
    names = {file.name for file in pictures.FOLDER.iterdir()}
    assert names == {
        f"{name}{theme.suffix}.png"
        for name in ("chat", "compare", "curves", "ladder", "runs", "tokenizer")
        for theme in pictures.THEMES
    }
    assert pictures.size() <= pictures.MOST_BYTES


def test_the_ladder_has_a_panel_for_each_text_with_our_mean_and_the_baselines_curve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ladder, "our_recipe", lambda: "ours")

    def run(text: str, name: str, steps: int, seed: int, bits: float) -> Record:
        return Record(
            text, "", 3, steps, name, seed, name, bits, 1e10 * steps, 1.0, "cpu", "float32", "2", "2026-12-01"
        )

    records = [
        run(text, *figures)
        for text in ("code", "documents")
        for seed in (1, 2)
        for figures in (
            ("ours", 800, seed, 0.8 + 0.1 * seed),
            ("upstream", 800, seed, 1.0 + 0.1 * seed),
            ("upstream", 1600, seed, 0.7 + 0.1 * seed),
            ("upstream", 3200, seed, 0.6 + 0.1 * seed),
        )
    ]
    panels = ladder_picture.draw(records, pictures.LIGHT).axes
    assert [panel.get_title(loc="left").partition(":")[0] for panel in panels] == ["code", "documents"]
    curve, ours = panels[0].lines[:2]
    assert list(curve.get_xdata()) == [8e12, 1.6e13] and list(curve.get_ydata()) == pytest.approx([1.15, 0.85])
    assert list(ours.get_xdata()) == [8e12] and list(ours.get_ydata()) == pytest.approx([0.95])
