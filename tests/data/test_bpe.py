"""What a run says about the rustbpe that is installed."""

import types
from pathlib import Path

import pytest

from nanochat.data import bpe
from nanochat.tokenizer import Tokenizer


def test_the_published_rustbpe_is_named_where_it_trains_and_not_where_it_encodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trainer = bpe.installed_rustbpe().Tokenizer
    published = types.SimpleNamespace(Tokenizer=lambda: trainer())  # has no from_ranks
    monkeypatch.setattr(bpe, "installed_rustbpe", lambda: published)
    bpe.encoding_rustbpe.cache_clear()
    try:
        Tokenizer.train(["the cat"] * 2, 266).save(tmp_path)
        assert capsys.readouterr().out.count("published rustbpe") == 1
        bpe.encoding_rustbpe.cache_clear()  # as in the process of another stage
        Tokenizer.load(tmp_path).encode("the cat")
        assert "rustbpe" not in capsys.readouterr().out
    finally:
        bpe.encoding_rustbpe.cache_clear()
