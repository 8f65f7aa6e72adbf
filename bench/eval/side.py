"""Evaluates one model with one program in a process of its own. Only bench.eval starts this file.

The first argument is the task as JSON: whose code, the folder of the model, a folder for CORE's tasks, the number of
problems, and the number format. The process prints a line when it is ready, and then answers each line of its input,
the name of an evaluation, with CPU seconds and the scores.
"""

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.eval.questions import choices, core_bundle
from nanochat import device
from nanochat.checkpoint_manager.load import Loaded, load_published
from nanochat.device import Compute
from nanochat.evals import core
from nanochat.evals.choices import evaluate_choices

ROWS = 4  # of a pass of lm-evaluation-harness, as of ours on a CPU
Evaluation = Callable[[], dict[str, float]]  # -> scores


def loaded(task: dict[str, Any]) -> tuple[Loaded, Compute]:
    """Our model of the folder, in the number format of the task."""
    dtype = device.DTYPES[task["dtype"]]
    compute = replace(device.compute_init("cpu"), dtype=dtype)
    return load_published(Path(task["model"]), None, compute), compute


def ours(task: dict[str, Any]) -> dict[str, Evaluation]:
    """What scripts.base_eval calls."""
    model, compute = loaded(task)
    compute.operations.serve(model.model)
    tokens = compute.platform.evaluation_rows * model.model.config.sequence_len
    tasks, asked = (
        core_bundle(Path(task["bundle"]) / task["side"], task["problems"]),
        choices(task["problems"]),
    )

    def run_core() -> dict[str, float]:
        scores = [
            core.evaluate_task(model.model, model.tokenizer, one, compute, None, tokens)
            for one in tasks
        ]
        return {score.label: score.accuracy for score in scores}

    def run_choices() -> dict[str, float]:
        score = evaluate_choices(asked, model.model, model.tokenizer, compute, tokens)
        return {"acc": score.acc, "acc_norm": score.acc_norm_bytes}

    return {"core": run_core, "choices": run_choices}


def upstream(task: dict[str, Any]) -> dict[str, Evaluation]:
    """Upstream's core_eval.py on the same model, whose forward pass is ours: what is compared is the evaluation."""
    path = Path(task["upstream"]) / "nanochat" / "core_eval.py"
    spec = importlib.util.spec_from_file_location("upstream_core_eval", path)
    assert spec is not None and spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    model, compute = loaded(task)
    words = model.tokenizer

    class Words:
        def __call__(self, texts: list[str], prepend: int) -> list[list[int]]:
            return [[prepend, *tokens] for tokens in words.encode_batch(texts)]

        def get_bos_token_id(self) -> int:
            return words.bos

    def run_core() -> dict[str, float]:
        scores = {}
        for one in core_bundle(Path(task["bundle"]) / task["side"], task["problems"]):
            meta = {
                "task_type": one.kind,
                "num_fewshot": one.shots,
                "continuation_delimiter": one.delimiter,
            }
            problems = core.read_problems(one)  # in upstream's order
            scores[one.label] = theirs.evaluate_task(
                model.model, Words(), problems, compute.device, meta
            )
        return scores

    return {"core": run_core}


def lm_eval(task: dict[str, Any]) -> dict[str, Evaluation]:
    """The harness's `hf` backend: only its scoring counts, not its bookkeeping of tasks."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    backend: Any = HFLM  # whose types are incomplete
    model = backend(
        task["model"], device="cpu", dtype=task["dtype"], batch_size=ROWS, max_length=2048
    )
    asked = choices(task["problems"])

    def run_choices() -> dict[str, float]:
        requests = []
        for number, one in enumerate(asked.asked):
            context = (
                "<|endoftext|>" + one.intro + "".join(one.examples) + one.question
            )  # our own rows begin so
            requests += [
                Instance("loglikelihood", {}, (context, f" {choice}"), number)
                for choice in one.choices
            ]
        found = iter(model.loglikelihood(requests, disable_tqdm=True))
        plain = by_bytes = 0
        for one in asked.asked:
            scores = [next(found)[0] for _ in one.choices]
            normed = [
                score / len(choice) for score, choice in zip(scores, one.choices, strict=True)
            ]
            plain += scores.index(max(scores)) == one.answer
            by_bytes += normed.index(max(normed)) == one.answer
        return {"acc": plain / len(asked), "acc_norm": by_bytes / len(asked)}

    return {"choices": run_choices}


def main() -> None:
    """Load the model and answer until the input ends; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    known = {"ours": ours, "upstream": upstream, "lm-eval": lm_eval}[task["side"]](task)
    print(json.dumps({"evaluations": list(known)}), file=answers, flush=True)
    for line in sys.stdin:
        start = time.process_time()
        with contextlib.redirect_stdout(sys.stderr):
            scores = known[line.strip()]()
        seconds = time.process_time() - start
        print(json.dumps({"seconds": seconds, "scores": scores}), file=answers, flush=True)


if __name__ == "__main__":
    main()
