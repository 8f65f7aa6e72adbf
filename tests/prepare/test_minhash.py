"""Signatures estimate the similarity of documents, in Chinese and in English, and near-duplicates are found by them."""

import numpy as np
import pytest

from nanochat.prepare import minhash
from nanochat.prepare.minhash import BANDS, BINS, SIMILAR, WINDOW, near_duplicates, signatures

ENGLISH = [f"{word}{i}" for i, word in enumerate("river stone garden winter music engine letter harbour".split() * 100)]
CHINESE = [chr(0x4E00 + 7 * i) for i in range(2_000)]


def text_of(units: list[str], seed: int, count: int, joint: str) -> str:
    return joint.join(np.random.default_rng(seed).choice(units, count))


def changed(text: str, share: float, seed: int = 0) -> str:
    """A text with a piece in the middle replaced by other text of the same alphabet."""
    cut = int(len(text) * share)
    start = (len(text) - cut) // 2
    letters = np.random.default_rng(seed).permutation([*text[start : start + cut]])
    return text[:start] + "".join(letters) + text[start + cut :]


def windows(text: str) -> set[bytes]:
    """The slow way: every window of bytes that begins with a character, of the text in lower case without marks."""
    kept = bytearray()
    for character in text:
        if ord(character) >= 128 or character.isalnum():
            kept += (character.lower() if character.isascii() else character).encode()
    kept = kept.ljust(WINDOW, b"\0")
    return {bytes(kept[i : i + WINDOW]) for i in range(len(kept) - WINDOW + 1) if kept[i] & 0xC0 != 0x80}


def jaccard(one: str, other: str) -> float:
    a, b = windows(one), windows(other)
    return len(a & b) / len(a | b)


@pytest.mark.parametrize(("units", "joint"), [(ENGLISH, " "), (CHINESE, "")], ids=["English", "Chinese"])
@pytest.mark.parametrize("count", [60, 4_000])
def test_equal_bins_estimate_the_jaccard_similarity_of_windows(units: list[str], joint: str, count: int) -> None:
    errors = []
    for seed in range(12):
        text = text_of(units, seed, count, joint)
        other = changed(text, seed / 14, seed)
        bins = signatures([text, other]).bins
        errors.append((bins[0] == bins[1]).mean() - jaccard(text, other))
    assert np.abs(errors).max() < 0.2 and abs(np.mean(errors)) < 0.06  # a bin is right or wrong: 1 / sqrt(BINS) is 0.09


@pytest.mark.parametrize("text", ["", "a", "词", "--- ...", "A short line.", "x" * 100_000, "教育" * 9_000, "é" * 15])
def test_texts_of_every_kind_resemble_themselves_and_nothing_else(text: str) -> None:
    found = signatures([text, text_of(ENGLISH, 1, 300, " "), text])
    assert found.bands.shape == (3, BANDS) and found.bins.shape == (3, BINS)
    assert near_duplicates(found).tolist() == [False, False, True]


def test_case_spaces_and_marks_do_not_count() -> None:
    text = text_of(ENGLISH, 3, 200, " ")
    found = signatures([text, text.upper().replace(" ", ",\n  ")])
    assert (found.bins[0] == found.bins[1]).all() and (found.bands[0] == found.bands[1]).all()


@pytest.mark.parametrize(("units", "joint"), [(ENGLISH, " "), (CHINESE, "")], ids=["English", "Chinese"])
def test_near_duplicates_are_found_as_a_comparison_of_all_pairs_finds_them(units: list[str], joint: str) -> None:
    """Copies that are clearly above the limit are found, texts that are clearly below it never are."""
    texts, alike = [], []
    for seed in range(60):
        text = text_of(units, seed, 250, joint)
        group = [text, changed(text, 0.02, seed), changed(text, 0.6, seed)]
        alike += [max((jaccard(one, earlier) for earlier in group[:n]), default=0.0) for n, one in enumerate(group)]
        texts += group
    found = near_duplicates(signatures(texts))
    similar = np.array(alike)
    assert SIMILAR == 0.75
    assert found[similar > 0.9].all() and not found[similar < 0.55].any()
    assert (similar > 0.9).sum() >= 50 and (similar < 0.55).sum() >= 120


def test_short_texts_with_one_window_in_common_are_no_near_duplicates() -> None:
    common = "the same sixteen bytes here"
    texts = [f"{text_of(ENGLISH, seed, 4, ' ')} {common} {text_of(ENGLISH, seed + 99, 4, ' ')}" for seed in range(40)]
    assert not near_duplicates(signatures(texts)).any()


def test_the_first_of_a_group_stays_whatever_the_order() -> None:
    texts = [text_of(CHINESE, seed % 5, 300, "") for seed in range(20)]
    assert near_duplicates(signatures(texts)).tolist() == [False] * 5 + [True] * 15
    assert near_duplicates(signatures([])).tolist() == []


def test_signatures_do_not_depend_on_what_else_is_in_the_list() -> None:
    texts = [text_of(ENGLISH, seed, 30 + 200 * seed, " ") for seed in range(8)]
    together = signatures(texts)
    for number, text in enumerate(texts):
        alone = signatures([text])
        assert (alone.bins[0] == together.bins[number]).all() and (alone.bands[0] == together.bands[number]).all()


def test_long_texts_that_repeat_themselves_resemble_only_each_other() -> None:
    texts = ["哈" * 9_000, "x" * 9_000, "哈哈" * 9_000, "ab 1" * 9_000]
    assert near_duplicates(signatures(texts)).tolist() == [False, False, True, False]


def test_leaving_out_windows_of_long_texts_changes_no_full_bin(monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(ENGLISH, 5, 5_000, " ")
    few = minhash._smallest_hashes(text)
    monkeypatch.setattr(minhash, "ENOUGH", 1 << 40)
    full = few != minhash.EMPTY
    assert full.sum() >= BINS - 2 and (minhash._smallest_hashes(text) == few)[full].all()
