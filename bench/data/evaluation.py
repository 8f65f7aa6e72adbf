"""Measures how fast questions with choices are scored, as C-Eval and MMLU ask them.

python -m bench.data.evaluation --quick                 # few questions, within 50 seconds
python -m bench.data.evaluation

How: one model of 36 million parameters with random weights, fabricated questions with the lengths
of published ones, one thread. The median round counts, in CPU seconds. dev/LOG.md has the same
beside lm-evaluation-harness and upstream's code.
"""

import builtins
import keyword
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from bench import child, tables
from bench.serve import model
from nanochat import device
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import log
from nanochat.data.command_line import run
from nanochat.data.conversation import Cloze
from nanochat.evals.choices import evaluate_choices
from nanochat.platforms.base import dtype_name

# Names from Python's standard library, which the model's vocabulary was trained on.
WORDS = sorted({*keyword.kwlist, *(name for name in dir(builtins) if name.islower())})
SHOTS = 5  # as C-Eval, CMMLU and MMLU show
INTRO = "The following are multiple choice questions.\n\n"


@dataclass(frozen=True)
class Config:
    """Print the speed of an evaluation as a table, and one JSON object on the last line."""

    quick: bool = False
    """6 instead of 32 questions, and one round instead of three"""


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


def words(draw: random.Random, low: int, high: int) -> str:
    """Return some random words."""
    return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))


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


def main(cfg: Config) -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    problems, rounds = (6, 1) if cfg.quick else (32, 3)
    compute = device.compute_init("cpu")
    with tempfile.TemporaryDirectory() as folder:
        files = model.make(Path(folder))
        loaded = load_published(files.folder, None, compute)
    compute.operations.serve(loaded.model)
    questions = choice_task(problems)
    tokens = compute.platform.evaluation_rows * loaded.model.config.sequence_len

    def evaluate() -> None:
        evaluate_choices(questions, loaded.model, loaded.tokenizer, compute, tokens)

    seconds = median(child.seconds_of(evaluate) for _ in range(rounds))
    dtype = dtype_name(compute.dtype)
    log(f"{files.parameters:,} parameters, {dtype}, {problems} questions, median of {rounds}")
    tables.show(("", "CPU s"), [("ours", f"{seconds:.2f}")])
    tables.finish("evaluation", {"dtype": dtype, "problems": problems, "cpu_seconds": seconds})


if __name__ == "__main__":
    run(main, Config, __doc__)
