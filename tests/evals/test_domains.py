"""Bits per byte by domain: which text belongs where, and sums equal to those of a slow reference."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat.common import UserError, write_json
from nanochat.data.corpora import DROPPED, Corpus, shards
from nanochat.data.mixing import Data
from nanochat.data.shards import ABOUT, read_about, texts, write_shards
from nanochat.evals.domains import domain, evaluate_domains
from nanochat.prepare.clean import _write_lists
from tests.support.tiny_model import on_cpu, tiny_gpt, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
MODEL = tiny_gpt(TOKENIZER.vocab_size)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The cat sat on the mat.", "latin"),
        ("猫坐在垫子上。", "zh"),
        ("用 Python 写的程序很慢", "zh"),
        ("In Chinese, a cat is 猫, which is one character.", "latin"),
        ("12 + 30 = 42; 7 * 8 = 56", "sums"),
        ("十二加三十等于四十二", "zh"),
        ("東京は日本の首都です", "ja"),
        ("고양이가 앉았다", "ko"),
        ("Кошка сидит", "cyrillic"),
        ("…!?", "other"),
        ("", "other"),
    ],
)
def test_a_text_belongs_to_the_domain_of_its_script(text: str, expected: str) -> None:
    assert domain(text) == expected


def corpus(folder: Path, name: str, documents: list[str]) -> Corpus:
    write_shards(folder / name, documents, about={"kind": "text"})
    return Corpus(name, folder / name)


def test_every_domain_has_the_loss_of_its_own_texts(tmp_path: Path) -> None:
    documents = [f"the cat number {i} sat on the mat. " * (1 + i % 9) for i in range(100)]
    documents += [f"第{i}只猫坐在垫子上。" * (1 + i % 5) for i in range(100)]
    cats = corpus(tmp_path, "cats", documents)
    found = evaluate_domains(MODEL, TOKENIZER, Data((cats,)), 10**9, 2_000, on_cpu())
    assert sorted(found) == ["latin", "zh"]
    sums = {name: [0.0, 0] for name in found}
    with torch.no_grad():
        for text in texts(shards(cats, "val")):
            tokens, name = TOKENIZER.encode(text), domain(text)
            for start in range(0, len(tokens), 160):
                piece = tokens[start : start + 160]
                logprobs = MODEL(torch.tensor([[TOKENIZER.bos, *piece]]))[0].double().log_softmax(-1)
                sums[name][0] -= sum(float(logprobs[t, token]) for t, token in enumerate(piece))
            sums[name][1] += len(text.encode())
    for name, (nats, size) in sums.items():
        assert found[name].bytes == size
        assert found[name].bits_per_byte == pytest.approx(nats / size / math.log(2), rel=1e-5)


def test_documents_that_are_left_out_of_the_corpus_are_not_measured(tmp_path: Path) -> None:
    cats = corpus(tmp_path, "cats", [f"the cat number {i} sat on the mat" for i in range(200)])
    (path,) = shards(cats, "val")
    first, *others = texts([path])
    entries = _write_lists([path], [np.arange(1, 1 + len(others))])
    write_json(cats.folder / ABOUT, read_about(cats.folder) | {DROPPED: {"shards": entries}})
    found = evaluate_domains(MODEL, TOKENIZER, Data((cats,)), 10**9, 2_000, on_cpu())
    assert others and found["latin"].bytes == len(first.encode())


def test_a_mixture_names_its_corpora_and_a_limit_takes_the_first_texts(tmp_path: Path) -> None:
    english = [f"the cat number {i} sat on the mat" for i in range(300)]
    chinese = [f"第{i}只猫坐在很大的垫子上，然后睡着了" for i in range(300)]
    data = Data((corpus(tmp_path, "a", english), corpus(tmp_path, "b", chinese)), (1, 1))
    assert sorted(evaluate_domains(MODEL, TOKENIZER, data, 10**9, 2_000, on_cpu())) == ["a: latin", "b: zh"]
    few = evaluate_domains(MODEL, TOKENIZER, data, 1, 2_000, on_cpu())
    assert len(few) == 1
    with pytest.raises(UserError, match="at least 1"):
        evaluate_domains(MODEL, TOKENIZER, data, 0, 2_000, on_cpu())
