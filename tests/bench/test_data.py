"""The data benchmark: what packing loses, by hand; its documents; and both sides on a little text."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bench.data import __main__ as bench
from bench.data import checkpoint, evaluation, upstream_side
from bench.data.__main__ import Config, Loss, documents, packing_loss
from bench.data.evaluation import Measured
from bench.data.questions import choice_task
from nanochat.checkpoint_manager import files as step_files
from nanochat.gpt import GPTConfig
from nanochat.prepare.packing import Packing
from nanochat.prepare.plan import Plan
from nanochat.prepare.token_files import TokenFile, TokenSet

# The part of upstream's API that bench.data uses: rows of documents in order, the last of each row cropped.
UPSTREAM = {
    "tokenizer.py": """
print("chatter that is no answer")

class RustBPETokenizer:
    def __init__(self, enc, bos_token):
        self.enc, self.bos_token_id = enc, enc.encode_single_token(bos_token)

    def get_bos_token_id(self):
        return self.bos_token_id

    def encode(self, text, prepend=None, num_threads=8):
        return [[prepend, *ids] for ids in self.enc.encode_ordinary_batch(text)]
""",
    "dataloader.py": """
import os
from pathlib import Path
import pyarrow.parquet as pq
import torch

def tokenizing_distributed_data_loader_with_state_bos_bestfit(tokenizer, B, T, split, device="cuda"):
    folder = Path(os.environ["NANOCHAT_BASE_DIR"]) / "base_data_climbmix"
    paths = sorted(folder.glob("*.parquet"))[:-1]
    texts = [text for path in paths for text in pq.read_table(path).column("text").to_pylist()]
    doc_buffer = tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id(), num_threads=1)
    while True:
        rows = []
        for _ in range(B):
            row = []
            while len(row) < T + 1:
                if not doc_buffer:
                    doc_buffer += tokenizer.encode(texts, prepend=tokenizer.get_bos_token_id())
                row += doc_buffer.pop(0)[: T + 1 - len(row)]
            rows.append(row)
        cells = torch.tensor(rows)
        yield cells[:, :-1], cells[:, 1:], {}
""",
}


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows, little text and a vocabulary that trains in a moment."""
    text = "".join(f"the cat number {i} sat on the mat of cat number {i + 1}; " for i in range(6_000))
    monkeypatch.setattr(bench, "standard_library", lambda: type("Text", (), {"documents": [text]}))
    monkeypatch.setattr(bench, "LENGTH", 512)
    monkeypatch.setattr(bench, "BATCH", 4)
    monkeypatch.setattr(bench, "PASSES", 2)
    monkeypatch.setattr(bench, "VOCABULARY", 340)
    monkeypatch.setattr(bench, "waiting_share", lambda *given: 0.008)
    measure = bench.measure_preparation
    monkeypatch.setattr(bench, "measure_preparation", lambda *given: measure(*given[:2], 1))


def test_documents_are_the_text_cut_again_and_again():
    text = "".join(map(chr, range(200, 60_000 // 2)))
    cut = list(documents(text, 2))
    assert "".join(cut) == text * 2 and len(cut) > 6
    assert cut == list(documents(text, 2))
    lengths = [len(one) for one in documents("x" * 10_000_000, 1)]
    assert 2_500 < np.median(lengths) < 2_900 and 3_900 < np.mean(lengths) < 4_600


def test_what_packing_loses_by_hand():
    # Rows of 10 cells. Documents of 5, 12, 3 and 4 tokens; one token of the last is in no row.
    lengths = np.array([5, 12, 3, 4])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = TokenSet(Path(), {"parts": []}, (TokenFile(np.zeros(24, np.uint16), offsets, None),))
    # Row 0: nine of the second. Row 1: the first, its end, a begin mark. Row 2: the third and three of the fourth.
    packing = Packing(np.array([0, 1, 4, 6]), np.array([5, 0, 14, 0, 17, 20]), np.array([9, 5, 3, 0, 3, 3], np.int32))
    plan = Plan(10, packing, np.array([10, 11, 8], np.int32), np.array([9, 8, 6], np.int32), "key", 0, 0)
    found = packing_loss(tokens, plan)
    assert found == Loss(pytest.approx(1 / 24), 0.5, 0.25, pytest.approx(3 / 23), pytest.approx(1 / 30))


def test_pieces_of_upstream_s_rows_begin_with_the_mark():
    found = upstream_side.pieces(np.array([[9, 1, 2, 9, 3], [9, 9, 4, 5, 6]]), 9)
    assert [piece.tolist() for piece in found] == [[9, 1, 2], [9, 3], [9], [9, 4, 5, 6]]


def test_quick_prints_a_table_and_one_json_object(little, capsys):
    bench.main(Config(quick=True))
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["benchmark"] == "data" and found["packing"]["lost"] == 0 and found["waiting_share"] == 0.008
    assert found["prepare"]["tokens_per_cpu_second"] > 0 and found["loader"]["tokens_per_cpu_second"] > 0
    assert "upstream" not in found


@pytest.mark.slow
def test_upstream_s_loader_reads_the_same_shards(little, tmp_path, capsys):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "__init__.py").touch()
    for name in ("gpt.py", "optim.py"):
        (tmp_path / "nanochat" / name).touch()
    for name, code in UPSTREAM.items():
        (tmp_path / "nanochat" / name).write_text(code, encoding="utf-8")
    bench.main(Config(upstream=tmp_path))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    theirs = found["upstream"]
    assert 0.1 < theirs["lost"] < 1 and theirs["cut_documents"] > found["packing"]["longer_than_a_row"]
    assert theirs["tokens_per_cpu_second"] > 0 and theirs["documents"] > 10


# --- evaluation and checkpoints --------------------------------------------------------------------


def test_the_questions_are_those_that_evaluations_read() -> None:
    task = choice_task(50)
    assert len(task) == 50 and len(task.cloze(0).choices) == 4 and len(task.cloze(0).examples) == 5
    assert {question.answer for question in task.questions} == {0, 1, 2, 3}
    assert choice_task(50).questions == task.questions


def test_the_median_round_and_equal_scores_are_reported() -> None:
    results = {"ours": Measured([1, 9, 2]), "lm-eval": Measured([8, 10, 9])}
    scores = {"ours": Measured([1], {"acc": 0.5}), "lm-eval": Measured([1], {"acc": 0.25})}
    summary = evaluation.figures(results, scores)
    assert summary["cpu_seconds"] == {"ours": 2, "lm-eval": 9}
    assert (summary["times_as_fast"], summary["equal_scores"]) == (4.5, False)


def test_an_evaluation_runs_in_a_process_of_its_own(tmp_path, capsys, monkeypatch):
    make = evaluation.model.make
    small = replace(evaluation.model.SHAPE, vocab_size=600, n_layer=1, n_embd=32, n_hidden=32)
    monkeypatch.setattr(evaluation.model, "make", lambda folder: make(folder, small, text=50_000))
    evaluation.main(evaluation.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(result["cpu_seconds"]) == {"ours"} and result["problems"] == 6


SMALL = GPTConfig(16, 1024, 2, 2, 2, 32)


def test_every_writer_writes_all_the_bytes(tmp_path: Path) -> None:
    stage = checkpoint.Stage(SMALL)
    tensors = stage.tensors()
    checkpoint.measure(stage, tmp_path, 2)
    raw = b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    assert (tmp_path / "raw").read_bytes() == raw
    step = tmp_path / "run" / "step_000001"
    assert step_files.verify(step) == ""
    ours = {}
    for path in step.glob("*.safetensors"):
        ours |= load_file(path)
    theirs = load_file(tmp_path / "theirs.safetensors")
    for saved in (ours, theirs, torch.load(tmp_path / "theirs.pt")):
        assert saved.keys() == tensors.keys()
        assert all(torch.equal(saved[name], tensors[name]) for name in tensors)


def test_a_quick_run_of_checkpoints_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "QUICK", SMALL)
    checkpoint.main(checkpoint.Config(quick=True))
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["ours_of_raw"] > 0 and 0 <= result["standstill_share"] <= 1
