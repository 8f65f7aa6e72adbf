"""lm-evaluation-harness, unmodified, against the server: its scores and log-likelihoods are those of the engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from tests.support.served import Served, serving

CHOICES = [
    {"question": "the cat sat on", "options": ["the mat", "12", "猫"], "gold": 0},
    {"question": "12 + 34 =", "options": ["46", "the mat", "90 90"], "gold": 0},
    {"question": "猫坐在", "options": ["垫子上", "strawberry", "count"], "gold": 1},
    {"question": "count", "options": ["56 78", "cat", "上"], "gold": 2},
]
ASKED = [{"question": text, "answer": "?"} for text in ("the cat", "12 34 56", "猫坐在垫子上")]
CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
TEXT_TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def log_likelihood(served: Served, context: str, continuation: str) -> tuple[float, bool]:
    """The natural log of a continuation's probability, by the engine itself, and whether it is the likeliest."""
    before, whole = (served.tokenizer.encode(text) for text in (context, context + continuation))
    scored = served.alone.generate([whole], Sampling(0.0, max_tokens=1, prompt_logprobs=1))[0].prompt_scores
    mine = scored[len(before) - 1 :]
    return sum(each.logprob for each in mine), all(each.token == each.alternatives[0][0] for each in mine)


def reply(served: Served, text: str) -> str:
    """The engine's own greedy reply, up to the end of a line."""
    stop = ("\n", served.tokenizer.decode([served.tokenizer.special("assistant_end")]))
    found = served.alone.generate([served.tokenizer.encode(text)], Sampling(0.0, max_tokens=12, stop=stop))[0]
    return "".join(part.text for part in found.parts or reply_parts(found.tokens, served.tokenizer))


# What the harness's own command does, without the table at its end, which needs a package of its own.
HARNESS = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, url = sys.argv[1:]
arguments = {"model": "nanochat-sft-d4", "base_url": url + "/v1/completions"}
arguments |= {"tokenizer_backend": "remote", "max_length": 160}
tasks = TaskManager(include_path=folder, include_defaults=False)
names = ["local_choice", "local_text"]
found = simple_evaluate("local-completions", arguments, names, batch_size=5, task_manager=tasks)
print(json.dumps({"results": found["results"], "samples": found["samples"]}, default=str))
"""


def harness(served: Served, folder: Path) -> tuple[dict[str, Any], dict[str, list[Any]]]:
    """Run the harness in a process of its own; return its results and its samples by task."""
    offline = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "*"}
    command = [sys.executable, "-c", HARNESS, str(folder), served.url]
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    samples = {task: sorted(found["samples"][task], key=lambda sample: sample["doc_id"]) for task in found["samples"]}
    return found["results"], samples


@pytest.mark.slow
def test_harness_finds_our_scores_and_log_likelihoods(tmp_path: Path) -> None:
    for name, rows, task in (("choice", CHOICES, CHOICE_TASK), ("text", ASKED, TEXT_TASK)):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(task.format(file=file), encoding="utf-8")
    with serving() as served:
        replies = [reply(served, row["question"]) for row in ASKED]
        (tmp_path / "text.jsonl").write_text(  # the first answer is right, so that the score is neither 0 nor 1
            "".join(
                json.dumps({**row, "answer": said if i == 0 else "?"}, ensure_ascii=False) + "\n"
                for i, (row, said) in enumerate(zip(ASKED, replies, strict=True))
            ),
            encoding="utf-8",
        )
        results, samples = harness(served, tmp_path)
        right = normed = 0
        for row, sample in zip(CHOICES, samples["local_choice"], strict=True):
            own = [log_likelihood(served, row["question"], f" {option}") for option in row["options"]]
            found = [float(answer[0][0]) for answer in sample["resps"]]
            assert found == pytest.approx([value for value, _ in own], abs=1e-4)
            assert [str(answer[0][1]) == "True" for answer in sample["resps"]] == [greedy for _, greedy in own]
            values = [value for value, _ in own]
            by_length = [value / len(option) for value, option in zip(values, row["options"], strict=True)]
            right += values.index(max(values)) == row["gold"]
            normed += by_length.index(max(by_length)) == row["gold"]
        assert results["local_choice"]["acc,none"] == pytest.approx(right / len(CHOICES), abs=1e-6)
        assert results["local_choice"]["acc_norm,none"] == pytest.approx(normed / len(CHOICES), abs=1e-6)
        assert [sample["resps"][0][0] for sample in samples["local_text"]] == replies
        hits = sum(said.strip() == (replies[0] if i == 0 else "?").strip() for i, said in enumerate(replies))
        assert results["local_text"]["exact_match,none"] == pytest.approx(hits / len(ASKED), abs=1e-6)
