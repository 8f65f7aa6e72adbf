"""A run that an earlier version began resumes: its folder, as that version wrote it, lies beside this test.

The archive holds a corpus of 150 short documents, its tokenizer, and a run of twelve steps that commit 2aea424
(November 2026) stopped after six. The losses below are those of the six steps that 2aea424 then did itself.
"""

import json
import tarfile
from pathlib import Path

import pytest

from nanochat.common import UserError
from scripts import base_train
from tests.support.flags import configured
from tests.support.tiny_model import on_cpu

ARCHIVE = Path(__file__).parents[1] / "support" / "files" / "run_of_2aea424.tar.xz"
FLAGS = {
    "data": "few",
    "model_tag": "t",
    "depth": 2,
    "model_dim": 24,
    "head_dim": 12,
    "max_seq_len": 64,
    "window_pattern": "SL",
    "bigram_rows": 32,
    "offset_layers": 1,
    "total_batch_size": 256,
    "device_batch_size": 2,
    "num_iterations": 12,
    "eval_every": 6,
    "eval_tokens": 512,
    "save_every": 6,
    "keep": 2,
    "compile": False,
}
LOSSES = [4.349851, 3.891915, 4.621201, 3.957125, 3.943832, 3.832891]
VAL_BPB = 5.068835


def test_a_run_begun_by_2aea424_resumes_with_the_losses_that_2aea424_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "base_checkpoints" / "t"
    with pytest.raises(UserError, match="--other_code"):
        base_train.train(configured(base_train.Config, **FLAGS), on_cpu())

    base_train.train(configured(base_train.Config, **FLAGS, other_code=True), on_cpu())

    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][6:]
    assert [step["step"] for step in steps] == [7, 8, 9, 10, 11, 12]
    assert [step["loss"] for step in steps] == pytest.approx(LOSSES, rel=1e-4)
    assert steps[-1]["val_bpb"] == pytest.approx(VAL_BPB, rel=1e-4)
    saved = json.loads((run / "step_000012" / "meta.json").read_text())
    assert base_train.DECAY_FACT not in saved["config"]  # so that it could be resumed again
