"""The data benchmark: what packing loses, by hand; its documents; and both sides on a little text."""

import json
from pathlib import Path

import numpy as np
import pytest

from bench.data import __main__ as bench
from bench.data import upstream_side
from bench.data.__main__ import Config, Loss, documents, packing_loss
from nanochat.common import UserError
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
    monkeypatch.setattr(bench, "waiting_share", lambda rows, compute, steps: 0.001 * steps)
    monkeypatch.setattr(
        bench, "measure_preparation", lambda *given, measure=bench.measure_preparation: measure(*given[:2], 1)
    )


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
    assert any(line.startswith("waiting for data") and "< 0.5 %" in line for line in lines)
    assert "upstream" not in found


@pytest.mark.slow
def test_upstream_s_loader_reads_the_same_shards(little, tmp_path, capsys):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "__init__.py").touch()
    for name, code in UPSTREAM.items():
        (tmp_path / "nanochat" / name).write_text(code, encoding="utf-8")
    bench.main(Config(upstream=tmp_path))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    theirs = found["upstream"]
    assert 0.1 < theirs["lost"] < 1 and theirs["cut_documents"] > found["packing"]["longer_than_a_row"]
    assert theirs["tokens_per_cpu_second"] > 0 and theirs["documents"] > 10


@pytest.mark.slow
def test_a_failing_upstream_is_quoted(little, tmp_path):
    (tmp_path / "nanochat").mkdir()
    (tmp_path / "nanochat" / "__init__.py").touch()
    (tmp_path / "nanochat" / "dataloader.py").write_text("raise OSError('no data today')", encoding="utf-8")
    with pytest.raises(UserError, match=r"ended with code 1; its last lines:\n(.|\n)*OSError: no data today"):
        bench.main(Config(upstream=tmp_path))


def test_what_cannot_be_measured_is_refused(tmp_path):
    for cfg, said in (
        (Config(quick=True, upstream=tmp_path), "leave out --quick or --upstream"),
        (Config(upstream=tmp_path), "which has no nanochat/dataloader.py"),
    ):
        with pytest.raises(UserError, match=said) as refused:
            bench.main(cfg)
        assert refused.value.exit_code == 2
