"""Scores questions with choices in a process of its own, for bench.data.evaluation.

It answers each request with its CPU seconds and the share of right answers.
"""

import builtins
import keyword
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import child
from nanochat.data.conversation import Cloze

# Names from Python's standard library, which the model's vocabulary was trained on.
WORDS = sorted({*keyword.kwlist, *(name for name in dir(builtins) if name.islower())})
SHOTS = 5  # as C-Eval, CMMLU and MMLU show
INTRO = "The following are multiple choice questions.\n\n"
ROWS = 4  # of a pass of lm-evaluation-harness, as of ours on a CPU

Evaluate = Callable[[], float]  # -> the share of right answers


def words(draw: random.Random, low: int, high: int) -> str:
    """Return some random words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


@dataclass(frozen=True)
class Choices:
    """Questions with four choices and five examples each, about 300 tokens: a ClozeTask."""

    questions: Sequence[Cloze]
    name: str = "multiple choice"
    shots: int = SHOTS

    def __len__(self) -> int:
        return len(self.questions)

    def cloze(self, i: int) -> Cloze:
        """Return question i."""
        return self.questions[i]


def choice_task(problems: int) -> Choices:
    """Return so many fabricated questions, with lengths as the published ones have."""
    draw = random.Random(2)
    examples = tuple(
        f"Question: {words(draw, 15, 30)}?\nAnswer: {words(draw, 2, 6)}\n\n" for _ in range(SHOTS)
    )
    questions = []
    for _ in range(problems):
        question = f"Question: {words(draw, 15, 30)}?\nAnswer:"
        answers = tuple(words(draw, 2, 6) for _ in range(4))
        questions.append(Cloze(INTRO, examples, question, answers, draw.randrange(4)))
    return Choices(questions)


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

    def evaluate() -> float:
        return evaluate_choices(questions, loaded.model, loaded.tokenizer, compute, tokens).acc

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

    def evaluate() -> float:
        requests = []
        for number, question in enumerate(questions):
            # Our own rows begin with this mark.
            context = "<|endoftext|>" + question.intro + "".join(question.examples)
            context += question.question
            for choice in question.choices:
                arguments = (context, f" {choice}")
                requests.append(Instance("loglikelihood", {}, arguments, number))
        likelihoods = iter(model.loglikelihood(requests, disable_tqdm=True))
        right = 0
        for question in questions:
            scores = [next(likelihoods)[0] for _ in question.choices]
            right += scores.index(max(scores)) == question.answer
        return right / len(questions)

    return evaluate


def main() -> None:
    """Load the model and answer until the input ends."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    make = {"ours": ours, "lm-eval": lm_eval}[task["side"]]
    evaluate = make(task)
    answer("ready")
    for _ in child.requests():
        start = time.process_time()
        accuracy = evaluate()
        answer({"seconds": time.process_time() - start, "accuracy": accuracy})


if __name__ == "__main__":
    main()
