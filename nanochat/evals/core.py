"""CORE: the mean over 22 few-shot tasks of accuracy above chance (DCLM, Li et al. 2024, arXiv:2406.11794).

Problems, few-shot examples and prompts are those of upstream nanochat, so that figures compare; here the prompts of
many problems go through the model together, and the head reads only the positions that count.
"""

import csv
import json
import os
import random
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from nanochat.common import UserError, base_dir, fsync_path, log
from nanochat.data import download
from nanochat.device import Compute
from nanochat.nn.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
SHUFFLE_SEED, EXAMPLES_SEED = 1337, 1234  # upstream's
PROBLEMS_AT_ONCE = 256  # rendered, tokenised and sorted by length together
HEAD_ROWS = 1024  # positions whose logits exist at one time

# Kind of task -> what its problems hold. `gold` is the number of the right choice or context.
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True)
class IclTask:
    """One task of the bundle. `baseline` is the accuracy of guessing, in [0, 1)."""

    label: str
    kind: str
    path: Path
    shots: int
    delimiter: str
    baseline: float


@dataclass(frozen=True)
class TaskScore:
    """Accuracy of a task, and the same with guessing at 0 and perfection at 1."""

    label: str
    accuracy: float
    centered: float
    problems: int
    seconds: float


@dataclass(frozen=True)
class Core:
    """Every task's score and their mean."""

    tasks: tuple[TaskScore, ...]
    core: float


# --- the bundle ----------------------------------------------------------------------------------


def find_bundle(given: str | Path | None = None) -> Path | None:
    """The folder of the eval bundle: the one given, which must be one; else <base>/eval_bundle; None without it."""
    folder = Path(given).expanduser() if given is not None else base_dir() / "eval_bundle"
    if (folder / "core.yaml").is_file():
        return folder
    if given is None and not folder.exists():
        return None
    raise UserError(f"{folder} is no eval bundle: it holds no core.yaml", exit_code=2)


def download_bundle(url: str = BUNDLE_URL, patience: download.Patience | None = None) -> Path:
    """Fetch the published bundle (162 MB) to <base>/eval_bundle, whole or not at all; call it on one rank."""
    base = base_dir()
    target, archive = base / "eval_bundle", base / "eval_bundle.zip"
    hint = f"On a machine with network, fetch {url}, and unpack it here as {target}, or give --eval_bundle its folder"

    def check(path: Path) -> None:
        if not zipfile.is_zipfile(path):
            raise ValueError("not a zip archive")

    log(f"fetching {url}")
    download.fetch_all([download.Remote(url, archive)], patience=patience, hint=hint, check=check, say=log)
    with tempfile.TemporaryDirectory(dir=base, prefix=".eval_bundle-") as folder:
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
        found = next(Path(folder).rglob("core.yaml"), None)
        if found is None:
            raise UserError(f"{archive} holds no core.yaml; delete it and try again. {hint}")
        os.rename(found.parent, target)
    fsync_path(base)
    archive.unlink()
    return target


def read_bundle(folder: Path) -> list[IclTask]:
    """The tasks that core.yaml lists, with the baselines of eval_meta_data.csv. UserError for what does not fit."""
    try:
        listed = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as f:
            percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(f)}
        tasks = [
            IclTask(
                label=entry["label"],
                kind=entry["icl_task_type"],
                path=folder / "eval_data" / entry["dataset_uri"],
                shots=int(entry["num_fewshot"][0]),
                delimiter=entry.get("continuation_delimiter", " "),
                baseline=percent[entry["label"]] / 100,
            )
            for entry in listed
        ]
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as broken:
        raise UserError(f"the eval bundle in {folder} is not as published: {broken!r}") from broken
    for task in tasks:
        if task.kind not in FIELDS:
            raise UserError(f"{task.label} of {folder}: the kind must be one of {', '.join(FIELDS)}, got {task.kind}")
        if not task.path.is_file():
            raise UserError(f"{task.label} of {folder}: no file {task.path}")
    return tasks


def read_problems(task: IclTask, limit: int | None = None) -> list[dict[str, Any]]:
    """The problems of a task in upstream's shuffled order, the first `limit` of them; each checked."""
    problems = []
    with open(task.path, encoding="utf-8") as f:
        for n, line in enumerate(f, start=1):
            try:
                problem = json.loads(line)
                options = {"multiple_choice": "choices", "schema": "context_options"}.get(task.kind)
                missing = [field for field in FIELDS[task.kind] if field not in problem]
                if missing or (options and not 0 <= problem["gold"] < len(problem[options])):
                    raise ValueError(f"lacks {missing}" if missing else "gold is no option")
            except (ValueError, TypeError) as broken:
                raise UserError(f"{task.path}, line {n}: {broken}") from broken
            problems.append(problem)
    random.Random(SHUFFLE_SEED).shuffle(problems)
    problems = problems[:limit]
    if len(problems) <= task.shots:
        raise UserError(
            f"{task.label} shows {task.shots} examples beside each problem, so it needs more problems than that; got "
            f"{len(problems)}: raise --max_per_task or leave it out"
        )
    return problems


# --- prompts -------------------------------------------------------------------------------------


def choose_examples(count: int, number: int, shots: int) -> list[int]:
    """The numbers of the problems shown before problem `number` of `count`: upstream's draw, never itself."""
    draw = random.Random(EXAMPLES_SEED + number).sample(range(count - 1), shots)
    return [other + (other >= number) for other in draw]


def _example(task: IclTask, problem: dict[str, Any]) -> str:
    """A solved problem, as it is shown before the one in question."""
    if task.kind == "multiple_choice":
        return f"{problem['query']}{task.delimiter}{problem['choices'][problem['gold']]}\n\n"
    if task.kind == "schema":
        return f"{problem['context_options'][problem['gold']]}{task.delimiter}{problem['continuation']}\n\n"
    return f"{problem['context'].strip()}{task.delimiter}{problem['continuation']}\n\n"


def render(task: IclTask, problem: dict[str, Any], examples: Sequence[dict[str, Any]]) -> list[str]:
    """The prompts of a problem: one per option; for language modeling that without and with the continuation."""
    shown = "".join(_example(task, example) for example in examples)
    if task.kind == "multiple_choice":
        return [f"{shown}{problem['query']}{task.delimiter}{choice}" for choice in problem["choices"]]
    if task.kind == "schema":
        contexts = problem["context_options"]
        return [f"{shown}{context}{task.delimiter}{problem['continuation']}" for context in contexts]
    question = f"{shown}{problem['context'].strip()}{task.delimiter}"
    # The delimiter's space belongs to the continuation's first token.
    return [question.strip(), f"{question}{problem['continuation']}"]


def common_prefix(rows: list[list[int]]) -> int:
    """How many tokens all rows begin with."""
    shortest, longest = min(rows), max(rows)  # in the order of lists, so all others lie between them
    for i, (a, b) in enumerate(zip(shortest, longest, strict=False)):
        if a != b:
            return i
    return min(len(shortest), len(longest))


@dataclass(frozen=True)
class Row:
    """A prompt as tokens, and which of them, [start, end), are judged."""

    question: int
    tokens: list[int]
    start: int


def make_rows(kind: str, question: int, prompts: list[list[int]]) -> list[Row]:
    """The rows to run for one problem from its prompts, each beginning with BOS.

    Judged is what differs: the end of each row behind the common beginning, or (schema) the common end of all rows.
    At least the last token is judged, also where one option begins with another.
    """
    if kind == "schema":
        same = common_prefix([tokens[::-1] for tokens in prompts])
        return [Row(question, tokens, max(1, len(tokens) - max(1, same))) for tokens in prompts]
    start = common_prefix(prompts)
    judged = prompts[1:] if kind == "language_modeling" else prompts
    return [Row(question, tokens, max(1, min(start, len(tokens) - 1))) for tokens in judged]


# --- the model -----------------------------------------------------------------------------------


def batches(rows: Sequence[Row], tokens_per_batch: int) -> Iterator[list[int]]:
    """Numbers of rows of like length, so many together that the padded batch holds at most `tokens_per_batch`."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i].tokens))
    while order:
        size = max(1, tokens_per_batch // len(rows[order[0]].tokens))
        yield order[:size]
        order = order[size:]


@torch.no_grad()
def score_rows(model: Model, rows: Sequence[Row], greedy: bool, pad: int) -> list[float]:
    """The mean nats of each row's judged tokens; with `greedy` 0.0 if all are the model's first choice, else 1.0."""
    longest = max(len(row.tokens) for row in rows)
    idx = torch.full((len(rows), longest), pad)
    places: list[Tensor] = []  # of the hidden states that predict the judged tokens, in the flattened batch
    for b, row in enumerate(rows):
        idx[b, : len(row.tokens)] = torch.tensor(row.tokens)
        places.append(torch.arange(row.start - 1, len(row.tokens) - 1) + b * longest)
    targets = torch.cat([torch.tensor(row.tokens[row.start :], dtype=torch.long) for row in rows]).to(model.device)
    hidden = model.hidden(idx.to(model.device)).flatten(0, 1)[torch.cat(places).to(model.device)]  # (N, C)
    if greedy:
        wrong = [
            model.logits(hidden[i : i + HEAD_ROWS]).argmax(dim=-1) != targets[i : i + HEAD_ROWS]
            for i in range(0, len(targets), HEAD_ROWS)
        ]
        values = torch.cat(wrong).float().cpu()
        return [float(part.any()) for part in values.split([len(place) for place in places])]
    values = model.token_losses(hidden, targets).double().cpu()
    if not values.isfinite().all():
        raise UserError("the model's loss is not finite: training has diverged; evaluate an earlier step")
    return [float(part.mean()) for part in values.split([len(place) for place in places])]


def judge(
    task: IclTask,
    problems: Sequence[dict[str, Any]],
    numbers: Sequence[int],
    model: Model,
    tokenizer: Tokenizer,
    tokens_per_batch: int,
) -> list[bool]:
    """Whether the model is right on each of the problems with these numbers."""
    prompts = []
    for number in numbers:
        examples = [problems[i] for i in choose_examples(len(problems), number, task.shots)]
        prompts.append(render(task, problems[number], examples))
    encoded = iter(tokenizer.encode_batch([text for group in prompts for text in group]))
    rows: list[Row] = []
    for question, group in enumerate(prompts):
        rows += make_rows(task.kind, question, [[tokenizer.bos, *next(encoded)] for _ in group])
    scores = [0.0] * len(rows)
    greedy = task.kind == "language_modeling"
    for batch in batches(rows, tokens_per_batch):
        for i, score in zip(batch, score_rows(model, [rows[i] for i in batch], greedy, tokenizer.bos), strict=True):
            scores[i] = score
    grouped: list[list[float]] = [[] for _ in prompts]
    for row, score in zip(rows, scores, strict=True):
        grouped[row.question].append(score)
    if greedy:
        return [group == [0.0] for group in grouped]
    right = [problems[number]["gold"] for number in numbers]
    return [group.index(min(group)) == gold for group, gold in zip(grouped, right, strict=True)]


def evaluate_task(
    model: Model,
    tokenizer: Tokenizer,
    task: IclTask,
    compute: Compute,
    limit: int | None = None,
    tokens_per_batch: int = 16384,
) -> TaskScore:
    """Accuracy of an unsharded model on a task, the problems dealt out to the ranks."""
    begin = time.perf_counter()
    problems = read_problems(task, limit)
    mine = range(compute.rank, len(problems), compute.world_size)
    right = 0
    for i in range(0, len(mine), PROBLEMS_AT_ONCE):
        right += sum(judge(task, problems, mine[i : i + PROBLEMS_AT_ONCE], model, tokenizer, tokens_per_batch))
    accuracy = parallel.total([float(right)], compute)[0] / len(problems)
    centered = (accuracy - task.baseline) / (1 - task.baseline)
    return TaskScore(task.label, accuracy, centered, len(problems), time.perf_counter() - begin)


def evaluate_core(
    model: Model,
    tokenizer: Tokenizer,
    folder: Path,
    compute: Compute,
    limit: int | None = None,
    tokens_per_batch: int = 16384,
) -> Core:
    """Every task of a bundle (at most `limit` problems of each), one log line each, and the mean.

    tokens_per_batch bounds the memory: that many positions, padding included, go through the model at once.
    """
    scores = []
    tasks = read_bundle(folder)
    for n, task in enumerate(tasks, start=1):
        score = evaluate_task(model, tokenizer, task, compute, limit, tokens_per_batch)
        scores.append(score)
        log(
            f"CORE {n:2}/{len(tasks)} {task.label:<34} {task.shots:2}-shot | accuracy {score.accuracy:.4f} | centered "
            f"{score.centered:+.4f} | {score.problems} problems, {score.seconds:.1f} s"
        )
    return Core(tuple(scores), sum(score.centered for score in scores) / len(scores))
