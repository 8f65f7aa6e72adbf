"""The loss of preferences against a plain one, pairs in rows, and what the reference says of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.common import UserError
from nanochat.models.qwen.model import Qwen
from nanochat.train.chat_rows import PairRows, chat_rows
from nanochat.train.preferences import PreferenceLoss, add_references
from tasks.mixtures import own_pairs
from tests.support.qwens import VOCABULARY, write_folder
from tests.support.tiny_model import on_cpu

WORDS = ("the", "cat", "sat", "on", "mat", "12", "34", "猫", "坐", "垫子")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, and a file of preferences, some of them after several turns."""
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, "qwen3")
    with open(folder / "pairs.jsonl", "w", encoding="utf-8") as lines:
        for i in range(60):
            said = [WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 7)]
            prompt = [{"role": "user", "content": " ".join(said)}]
            if i % 3 == 0:
                prompt = [*prompt, {"role": "assistant", "content": said[0]}, {"role": "user", "content": said[-1]}]
            record = {"prompt": prompt, "chosen": [{"role": "assistant", "content": " ".join(said[::-1])}],
                      "rejected": [{"role": "assistant", "content": said[1]}]}  # fmt: skip
            print(json.dumps(record, ensure_ascii=False), file=lines)
    return folder


def rows_of(folder: Path, length: int, too_long: Any = "cut", file: str = "pairs.jsonl") -> PairRows:
    tokenizer: Any = FolderTokenizer(folder, VOCABULARY)
    rows, _ = chat_rows("t", own_pairs([str(folder / file)]), tokenizer, length, 1, True, too_long, pairs=True)
    assert isinstance(rows, PairRows)
    return rows


def moved(model: Qwen) -> Qwen:
    """The model after a step in some direction, so that it differs from its reference."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def log_probability(model: Qwen, ids: list[int], mask: list[int]) -> Tensor:
    """The sum over the trained tokens of a conversation by itself, from whole logits."""
    logits = model(torch.tensor([ids[:-1]]))[0]
    each = logits - logits.exp().sum(dim=1, keepdim=True).log()
    return sum((each[t, ids[t + 1]] for t in range(len(ids) - 1) if mask[t + 1]), start=torch.zeros(()))


@pytest.mark.parametrize(("smoothing", "weight"), [(0.0, 0.0), (0.2, 0.0), (0.1, 0.7)])
def test_loss_gradient_and_figures_equal_those_of_answers_one_by_one(
    folder: Path, smoothing: float, weight: float
) -> None:
    beta, tokenizer = 0.3, FolderTokenizer(folder, VOCABULARY)
    reference, model, rows = load_qwen(folder, on_cpu()), moved(load_qwen(folder, on_cpu())), rows_of(folder, 250)
    add_references(rows, reference, "a", 2, on_cpu())
    inputs, targets, documents, references = rows.batch(np.arange(4))
    objective = PreferenceLoss(beta, smoothing, weight)
    found = objective(model, inputs, targets, documents=documents, references=references)
    found[0].backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    train = list(own_pairs([str(folder / "pairs.jsonl")]).train())
    wanted, pairs = torch.zeros(4), 0
    for first, second in zip(train[::2], train[1::2], strict=True):
        rendered = [tokenizer.render(one) for one in (first, second)]
        if not any(holds(inputs[row], rendered[0].ids) and holds(inputs[row], rendered[1].ids) for row in range(4)):
            continue
        pairs += 1
        ours = [log_probability(model, one.ids, one.mask) for one in rendered]
        with torch.no_grad():
            theirs = [log_probability(reference, one.ids, one.mask) for one in rendered]
        margin = beta * ((ours[0] - theirs[0]) - (ours[1] - theirs[1]))
        right, wrong = 1 / (1 + torch.exp(-margin)), 1 / (1 + torch.exp(margin))
        loss = -(1 - smoothing) * right.log() - smoothing * wrong.log() - weight * ours[0] / sum(rendered[0].mask)
        loss.backward()
        wanted += torch.stack((loss, (margin > 0).float(), margin, beta * (ours[0] - theirs[0]))).detach()
    assert pairs == rows.pair_starts[4] > 4  # a row holds several
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)


def holds(row: Tensor, ids: list[int]) -> bool:
    """Whether a row holds the tokens of a conversation, of which the end of a row may lack the last one."""
    return str(ids[:-1])[1:-1] in str(row.tolist())


def test_an_untrained_model_has_no_margin_and_loses_log_2(folder: Path) -> None:
    model, rows = load_qwen(folder, on_cpu()), rows_of(folder, 150)
    add_references(rows, model, "a", 4, on_cpu())
    inputs, targets, documents, references = rows.batch(np.arange(4))
    pairs = int(rows.pair_starts[4])
    with torch.no_grad():
        loss, *others = PreferenceLoss()(model, inputs, targets, documents=documents, references=references).tolist()
    assert loss == pytest.approx(pairs * 0.693147, rel=1e-5) and others == pytest.approx([0, 0, 0], abs=1e-4)


def test_only_what_follows_the_shared_turns_is_scored(folder: Path) -> None:
    rows, tokenizer = rows_of(folder, 150), FolderTokenizer(folder, VOCABULARY)
    train = list(own_pairs([str(folder / "pairs.jsonl")]).train())
    answers = sorted(one.messages[-1].text for one in train)
    found = []
    for row in range(rows.size):
        _, targets, documents, _ = (tensor[0] for tensor in rows.batch(np.array([row])))
        for number in range(2 * int(rows.pair_starts[row + 1] - rows.pair_starts[row])):
            trained = targets[(documents == number) & (targets >= 0)].tolist()
            assert tokenizer.decode(trained[-1:]) == "<|im_end|>"
            found.append(tokenizer.decode(trained[:-1]))
    assert sorted(found) == answers


def test_pairs_longer_than_a_row_share_it_or_are_left_out(folder: Path) -> None:
    path = folder / "long.jsonl"
    records = [("b", "b", "c"), ("a", "b", "the cat sat " * 30), ("a", "the " * 40, "cat " * 40),
               ("mat " * 60, "b", "c"), ("a", "b", "c")]  # fmt: skip
    lines = [json.dumps(dict(zip(("prompt", "chosen", "rejected"), record, strict=True))) for record in records]
    path.write_text("\n".join(lines))
    seen = {}
    for too_long in ("cut", "drop"):
        rows = rows_of(folder, 63, too_long, "long.jsonl")
        seen[too_long] = []
        for row in range(rows.size):
            _, targets, documents, _ = (tensor[0] for tensor in rows.batch(np.array([row])))
            count = 2 * int(rows.pair_starts[row + 1] - rows.pair_starts[row])
            seen[too_long] += [int((documents == number).sum()) for number in range(count)]
            assert all((targets[documents == number] >= 0).any() for number in range(count))
    assert (
        len(seen["drop"]) == 2
    )  # the last record is for validation, and of the one before nothing fits but its question
    short = seen["drop"][0]
    assert sorted(seen["cut"]) == sorted([short, short, short, 64 - short - 1, 32, 31])


def test_references_are_computed_once_and_again_where_their_file_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, rows = load_qwen(folder, on_cpu()), rows_of(folder, 150)
    add_references(rows, model, "a", 2, on_cpu())
    first = rows.references
    assert (first < 0).all()
    other = rows_of(folder, 150)
    add_references(other, moved(load_qwen(folder, on_cpu())), "a", 2, on_cpu())  # kept, so the model is not asked
    assert np.array_equal(other.references, first)
    add_references(other, moved(load_qwen(folder, on_cpu())), "b", 2, on_cpu())  # another model
    assert not np.array_equal(other.references, first)
    for path in rows.folder.glob("reference-*.npz"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    add_references(rows, model, "a", 3, on_cpu())
    assert "cannot be used and are computed again" in capsys.readouterr().err
    np.testing.assert_allclose(rows.references, first, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"beta": 0.0}, "beta of DPO must be above 0, got 0.0"),
        ({"label_smoothing": 0.5}, "from 0 to below 0.5, got 0.5"),
        ({"sft_weight": -1.0}, "must be 0 or above, got -1.0"),
        ({"beta": float("nan")}, "above 0, got nan"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, float], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        PreferenceLoss(**given)
