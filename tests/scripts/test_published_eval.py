"""The evaluations of published models, of their adapters and of fine-tuned ones: what is measured, and its names."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.load import Loaded, load_published
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, base_dir
from nanochat.data.corpora import Corpus, shards
from nanochat.data.shards import texts, write_shards
from nanochat.evals.records import read_records
from nanochat.report import summary
from nanochat.report.sections import read_sections, sections_of_run
from scripts import base_eval, base_loss, chat_eval, finetune
from tests.scripts.test_finetune import config as tuning
from tests.scripts.test_finetune import models as models  # a fixture: published models, and conversations
from tests.support.tiny_model import on_cpu, tiny_checkpoint

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"
DOCUMENTS = [f"the cat number {i} sat on the mat. 第{i}只猫坐在垫子上。" for i in range(300)]
ARC = {"task_name": "ARC-Easy", "max_problems": 3, "batch_size": 8}


@pytest.fixture
def model(models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A published model whose context holds a question of ARC."""
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))
    config = models / "qwen3" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 1024}))
    return models / "qwen3"


@torch.no_grad()
def reference_nats(model: Path, documents: list[str]) -> float:
    """The loss of whole documents, one at a time, from a softmax in float64."""
    loaded = load_published(model, None, on_cpu())
    nats = 0.0
    for document in documents:
        ids = [loaded.tokenizer.bos, *loaded.tokenizer.encode(document)]
        logprobs = loaded.model(torch.tensor([ids]))[0].double().log_softmax(-1)
        nats -= sum(float(logprobs[i, token]) for i, token in enumerate(ids[1:]))
    return nats


def test_bits_per_byte_of_a_published_model_are_those_of_its_own_tokenizer(model: Path) -> None:
    folder = base_dir() / "base_data" / "cats"
    write_shards(folder, DOCUMENTS, rows_per_shard=200)
    held_out = list(texts(shards(Corpus("cats", folder), "val")))
    size = sum(len(text.encode()) for text in held_out)
    cfg = base_loss.Config(model=model, data="cats", split_tokens=10**6, domain_tokens=10**6, sample_tokens=2)
    section = base_loss.evaluate(cfg, on_cpu())
    assert section["val"]["bytes"] == size and "train" not in section
    domains = section["domains"].values()
    assert sum(loss["bytes"] for loss in domains) == size
    nats = sum(loss["nats_per_token"] * loss["tokens"] for loss in domains)
    assert nats == pytest.approx(reference_nats(model, held_out), rel=1e-5)
    bits = nats / math.log(2) / size
    assert section["val"]["bits_per_byte"] == pytest.approx(bits, rel=0.1)  # several documents in a row
    assert read_sections()["published_loss"] == section and section["tag"] == "qwen3"


def test_multiple_choice_is_measured_by_letters_and_by_likelihood(model: Path) -> None:
    scores: Any = chat_eval.chat_eval(chat_eval.Config(model=model, by="both", **ARC), on_cpu())
    assert list(scores) == ["ARC-Easy", "ARC-Easy likelihood"]
    rows = read_sections()["published_eval"]["tasks"]
    assert list(rows) == ["ARC-Easy", "ARC-Easy acc", "ARC-Easy acc_norm"]
    assert rows["ARC-Easy acc"]["accuracy"] == scores["ARC-Easy likelihood"].acc
    base = base_eval.evaluate(base_eval.Config(model=model, tasks="ARC-Easy", max_per_task=3), on_cpu())
    choices = base["choices"]["ARC-Easy"]
    assert (choices["acc"], choices["acc_norm"]) == (
        rows["ARC-Easy acc"]["accuracy"],
        rows["ARC-Easy acc_norm"]["accuracy"],
    )
    files = sorted(path.stem[:-9] for path in (base_dir() / "records" / "published-qwen3-000000").iterdir())
    assert files == ["ARC-Easy", "ARC-Easy", "ARC-Easy_likelihood"]  # the second is of base_eval
    only: Any = chat_eval.chat_eval(chat_eval.Config(model=model, by="likelihood", **ARC), on_cpu())
    assert list(only) == ["ARC-Easy likelihood"]


def test_an_adapter_and_its_run_are_the_same_model_under_names_that_tell_them_apart(model: Path) -> None:
    finetune.train(tuning(model.parent, num_iterations=2), on_cpu())
    step = checkpoint_dir("tune", "made") / "step_000002"
    merged: Any = chat_eval.chat_eval(chat_eval.Config(model=model, adapter=step, **ARC), on_cpu())
    tuned: Any = chat_eval.chat_eval(chat_eval.Config(source="tune", **ARC), on_cpu())
    chat_eval.chat_eval(chat_eval.Config(model=model, **ARC), on_cpu())
    records = base_dir() / "records"
    answers = [read_records(next((records / name).glob("ARC-Easy-*.jsonl")))[1]
               for name in ("published-qwen3_made_step_2-000000", "tune-made-000002", "published-qwen3-000000")]  # fmt: skip
    logprobs = [[value for answer in lines for value in answer["logprobs"].values()] for lines in answers]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4) and logprobs[0] != pytest.approx(logprobs[2], abs=1e-3)
    assert merged["ARC-Easy"].accuracy == tuned["ARC-Easy"].accuracy
    sections = sections_of_run(read_sections(), "tune_eval")
    assert list(sections) == ["published_eval", "tune_train", "tune_eval"]
    assert set(summary.table(sections)["ARC-Easy"]) == {"published", "tune"}


@pytest.mark.parametrize(
    ("evaluate", "flags"),
    [
        (base_loss.evaluate, lambda model: base_loss.Config(model=model)),
        (base_loss.evaluate, lambda model: base_loss.Config(model=model, source="tune")),
        (base_eval.evaluate, lambda model: base_eval.Config(model=model, model_tag="d4")),
        (base_eval.evaluate, lambda model: base_eval.Config(adapter=model)),
        (chat_eval.chat_eval, lambda model: chat_eval.Config(model=model, step=0)),
    ],
)
def test_flags_that_name_two_models_or_no_texts_are_refused(
    evaluate: Callable[..., Any], flags: Callable[[Path], Any], model: Path
) -> None:
    with pytest.raises(UserError) as refused:
        evaluate(flags(model), on_cpu())
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("stage", "from_folder", "rows"),
    [
        ("published", True, 2048),
        ("tune", True, 2048),
        ("rl", True, 2048),
        ("rl", False, 40_960),
        ("base", False, 40_960),
    ],
)
def test_a_published_model_is_measured_on_rows_that_fit_into_memory(stage: str, from_folder: bool, rows: int) -> None:
    model = SimpleNamespace(config=SimpleNamespace(sequence_len=40_960))
    tokenizer = SimpleNamespace(takes_options=from_folder)
    assert Loaded(model, tokenizer, {}, stage, "a", 0).row_tokens == rows  # type: ignore[arg-type]


def test_a_later_stage_is_measured_beside_the_base_model() -> None:
    tiny_checkpoint("base", corpus="cats", tag="d4")
    tiny_checkpoint("sft", corpus="cats", tag="d4")
    write_shards(base_dir() / "base_data" / "cats", DOCUMENTS, rows_per_shard=200)
    for source in (None, "sft"):
        base_eval.evaluate(base_eval.Config(source=source, split_tokens=1000), on_cpu())
    assert list(read_sections()) == ["base_eval", "sft_core"]
