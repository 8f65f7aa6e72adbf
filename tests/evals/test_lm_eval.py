"""lm-evaluation-harness, unmodified, with transformers: multiple choice of a published model gives our figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.load import load_published
from nanochat.common import base_dir
from nanochat.data.conversation import Cloze
from nanochat.evals.choices import evaluate_choices
from nanochat.evals.records import Records, read_records
from tests.serve.test_lm_eval import CHOICE_TASK, CHOICES
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu

HARNESS = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, model = sys.argv[1:]
tasks = TaskManager(include_path=folder, include_defaults=False)
arguments = {"pretrained": model, "dtype": "float32"}
found = simple_evaluate("hf", arguments, ["local_choice"], batch_size=1, device="cpu", task_manager=tasks)
samples = sorted(found["samples"]["local_choice"], key=lambda sample: sample["doc_id"])
resps = [[float(answer[0][0]) for answer in sample["resps"]] for sample in samples]
print(json.dumps({"results": found["results"]["local_choice"], "resps": resps}, default=str))
"""


class Questions:
    name = "local_choice"

    def __len__(self) -> int:
        return len(CHOICES)

    def cloze(self, i: int) -> Cloze:
        row: Any = CHOICES[i]
        return Cloze("", (), row["question"], tuple(row["options"]), row["gold"])


def harness(folder: Path, model: Path) -> dict[str, Any]:
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, "-c", HARNESS, str(folder), str(model)]
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_likelihoods_and_accuracies_of_a_published_model_are_those_of_the_harness(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_folder(model, "qwen3")
    settings = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in CHOICES)
    (tmp_path / "choice.jsonl").write_text(rows, encoding="utf-8")
    (tmp_path / "choice.yaml").write_text(CHOICE_TASK.format(file=tmp_path / "choice.jsonl"), encoding="utf-8")
    theirs = harness(tmp_path, model)

    loaded = load_published(model, None, on_cpu())
    records = Records(base_dir() / "records", "local", {}, on_cpu())
    score = evaluate_choices(Questions(), loaded.model, loaded.tokenizer, on_cpu(), 1000, records=records)
    _, answers = read_records(records.path)
    ours = [[logprob for _, logprob, _ in answer["logprobs"]] for answer in answers]
    assert ours == [pytest.approx(row, abs=1e-3) for row in theirs["resps"]]
    assert score.acc == theirs["results"]["acc,none"] and score.acc_norm == theirs["results"]["acc_norm,none"]
