"""Scores questions with choices in a process of its own. Only bench.data.evaluation starts this file.

It answers each request with its CPU seconds and its scores.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import child
from bench.data.questions import choice_task

ROWS = 4  # of a pass of lm-evaluation-harness, as of ours on a CPU

Evaluate = Callable[[], dict[str, float]]  # -> scores


def ours(task: dict[str, Any]) -> Evaluate:
    """Return what scripts.base_eval calls."""
    from nanochat import device
    from nanochat.checkpoint_manager.load import load_published
    from nanochat.evals.choices import evaluate_choices

    compute = replace(device.compute_init("cpu"), dtype=device.DTYPES[task["dtype"]])
    loaded = load_published(Path(task["model"]), None, compute)
    compute.operations.serve(loaded.model)
    tokens = compute.platform.evaluation_rows * loaded.model.config.sequence_len
    questions = choice_task(task["problems"])

    def evaluate() -> dict[str, float]:
        score = evaluate_choices(questions, loaded.model, loaded.tokenizer, compute, tokens)
        return {"acc": score.acc, "acc_norm": score.acc_norm_bytes}

    return evaluate


def lm_eval(task: dict[str, Any]) -> Evaluate:
    """Return the harness's `hf` backend: only its scoring counts, not its bookkeeping of tasks."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    backend: Any = HFLM  # whose types are incomplete
    model = backend(
        task["model"], device="cpu", dtype=task["dtype"], batch_size=ROWS, max_length=2048
    )
    questions = choice_task(task["problems"]).questions

    def evaluate() -> dict[str, float]:
        requests = []
        for number, question in enumerate(questions):
            # Our own rows begin with this mark.
            context = "<|endoftext|>" + question.intro + "".join(question.examples)
            context += question.question
            for choice in question.choices:
                arguments = (context, f" {choice}")
                requests.append(Instance("loglikelihood", {}, arguments, number))
        likelihoods = iter(model.loglikelihood(requests, disable_tqdm=True))
        right = right_by_bytes = 0
        for question in questions:
            scores = [next(likelihoods)[0] for _ in question.choices]
            pairs = zip(scores, question.choices, strict=True)
            normed = [score / len(choice) for score, choice in pairs]
            right += scores.index(max(scores)) == question.answer
            right_by_bytes += normed.index(max(normed)) == question.answer
        count = len(questions)
        return {"acc": right / count, "acc_norm": right_by_bytes / count}

    return evaluate


def main() -> None:
    """Load the model and answer until the input ends."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    evaluate = {"ours": ours, "lm-eval": lm_eval}[task["side"]](task)
    answer({"ready": True})
    for _ in child.requests():
        start = time.process_time()
        scores = evaluate()
        answer({"seconds": time.process_time() - start, "scores": scores})


if __name__ == "__main__":
    main()
