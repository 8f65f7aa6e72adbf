"""The perplexity of general text, which shows what fine-tuning forgets."""

import math
from pathlib import Path

import pytest
import torch

from nanochat.common import UserError
from nanochat.train.forgetting import GeneralText, read_passages
from tests.support.tiny_model import TINY, on_cpu, tiny_gpt, tiny_tokenizer

PASSAGES = ["the cat sat on the mat", "猫坐在垫子上。", "12 and 34", "a", "one more, so that the last pass is not full"]


def test_the_perplexity_is_the_mean_over_the_passages_one_by_one() -> None:
    model, tokenizer = tiny_gpt(TINY), tiny_tokenizer()
    nats, count = 0.0, 0
    for passage in PASSAGES:
        tokens = torch.tensor([[tokenizer.bos, *tokenizer.encode(passage)]])
        with torch.no_grad():
            nats += float(model(tokens[:, :-1], tokens[:, 1:], reduction="sum"))
        count += tokens.size(1) - 1
    measured = GeneralText(PASSAGES, model, tokenizer, on_cpu()).perplexity(2)
    assert measured == pytest.approx(math.exp(nats / count), rel=1e-5)


def test_a_factor_compares_with_the_first_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    general = GeneralText(PASSAGES, tiny_gpt(TINY), tiny_tokenizer(), on_cpu())
    before = general.measure(0, 4)
    general.measure(10, 4)
    first, second = capsys.readouterr().out.splitlines()
    assert f"{before:.3f}" in first and "1.00 times" in second and f"{before:.3f}" in second


def test_a_run_that_measured_nothing_before_training_compares_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that resumed with --eval_every took its first measurement for the one before training."""
    general = GeneralText(PASSAGES, tiny_gpt(TINY), tiny_tokenizer(), on_cpu())
    general.measure(6, 4)
    general.measure(8, 4)
    assert "before training" not in capsys.readouterr().out


def test_passages_come_from_the_package_or_from_a_file(tmp_path: Path) -> None:
    assert len(read_passages(None)) > 15 and any("茶园" in passage for passage in read_passages(None))
    file = tmp_path / "mine.txt"
    file.write_text("\ufeffone\n\n\n\ntwo\nlines\n", encoding="utf-8")
    assert read_passages(file) == ["one", "two\nlines"]


@pytest.mark.parametrize("content", [None, b" \n\n", "文本".encode("utf-16")])
def test_a_text_that_cannot_be_measured_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"mine\.txt") as failure:
        read_passages(file)
    assert failure.value.exit_code == 2
