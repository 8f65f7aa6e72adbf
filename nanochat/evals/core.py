"""CORE: the mean over 22 few-shot tasks of accuracy above chance (DCLM, Li et al. 2024, arXiv:2406.11794).

Problems, few-shot examples and prompts equal upstream nanochat's, so the figures can be compared. Here the prompts of
many problems share a batch, and the head computes logits only for the positions that are scored.
"""

import csv
import os
import random
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from nanochat.common import (
    UserError,
    base_dir,
    check_regular,
    fsync_path,
    log,
    parse_json,
    sha256_of,
    warn,
)
from nanochat.data.sources import download
from nanochat.device import Compute
from nanochat.evals.likelihood import PromptRow, score_rows
from nanochat.evals.records import Records
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer

MOST_SHOTS = 100
YAML_BYTES = 1 << 20  # of the largest core.yaml that is read; the published one has 3 kB
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
MOST_PACKED, MOST_UNPACKED, MOST_FILES = (
    500_000_000,
    2_000_000_000,
    1_000,
)  # the published one: 162 MB packed
SHUFFLE_SEED, EXAMPLES_SEED = 1337, 1234  # equal to upstream's
PROBLEMS_AT_ONCE = 256  # problems to render, tokenise and sort by length together

# Kind of task -> the fields of its problems. `gold` is the index of the right choice or context.
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


@dataclass(frozen=True)
class IclTask:
    """One task of the bundle. `baseline` is the accuracy of random guessing, in [0, 1)."""

    label: str
    kind: str
    path: Path
    shots: int
    delimiter: str
    baseline: float


@dataclass(frozen=True)
class TaskScore:
    """The accuracy of a task, and `centered`: the accuracy rescaled so that guessing is 0 and perfection is 1."""

    label: str
    accuracy: float
    centered: float
    problems: int
    seconds: float


@dataclass(frozen=True)
class Core:
    """The score of every task, and CORE: the mean of the centered accuracies, or None if a task is `broken`."""

    tasks: tuple[TaskScore, ...]
    core: float | None
    broken: tuple[str, ...] = ()


# --- the bundle ----------------------------------------------------------------------------------


def find_bundle(given: str | Path | None = None) -> Path | None:
    """The folder of the eval bundle: `given`, else <base>/eval_bundle, or None. UserError if it is not a bundle."""
    folder = Path(given).expanduser() if given is not None else base_dir() / "eval_bundle"
    if (folder / "core.yaml").is_file():
        return folder
    if given is None and not folder.exists():
        return None
    hint = (
        "Delete it, then use --download"
        if given is None
        else "Name the folder that holds it with --eval_bundle"
    )
    raise UserError(f"{folder} is not an eval bundle: it has no core.yaml. {hint}", exit_code=2)


def download_bundle(url: str = BUNDLE_URL, patience: download.Patience | None = None) -> Path:
    """Download the published bundle (162 MB) to <base>/eval_bundle, whole or not at all. Call it on one rank only."""
    base = base_dir()
    target, archive = base / "eval_bundle", base / "eval_bundle.zip"
    hint = f"On a machine with network, download {url}, and unpack it here as {target}, or give --eval_bundle its folder"

    def check(path: Path) -> None:
        if not zipfile.is_zipfile(path):
            raise ValueError("not a zip archive")

    size = download.probe_size(url, {}, patience, hint)
    if size and size > MOST_PACKED:
        raise UserError(f"{url} has {size:,} bytes; the bundle has at most {MOST_PACKED:,}. {hint}")
    log(f"downloading {url}")
    download.fetch_all(
        [download.Remote(url, archive)], patience=patience, hint=hint, check=check, say=log
    )
    log(
        f"{archive.name}: SHA-256 {sha256_of(archive)}"
    )  # the publisher promises none; compare it between machines
    with tempfile.TemporaryDirectory(dir=base, prefix=".eval_bundle-") as folder:
        with zipfile.ZipFile(archive) as packed:
            files = packed.infolist()
            if len(files) > MOST_FILES or sum(file.file_size for file in files) > MOST_UNPACKED:
                archive.unlink()
                raise UserError(
                    f"{url} unpacks to {len(files):,} files of {sum(file.file_size for file in files):,} bytes; the "
                    f"bundle has at most {MOST_FILES:,} files of {MOST_UNPACKED:,}. {hint}"
                )
            packed.extractall(folder)
        found = next(Path(folder).rglob("core.yaml"), None)
        if found is None:
            raise UserError(f"{archive} has no core.yaml: delete it and try again. {hint}")
        os.rename(found.parent, target)
    fsync_path(base)
    archive.unlink()
    return target


def _read_yaml(path: Path) -> Any:
    """The value of a short YAML file. ValueError or YAMLError for a pipe or device, deep nesting, or aliases, which
    can make a few lines mean billions."""
    check_regular(path, YAML_BYTES)
    text, depth = path.read_text(encoding="utf-8"), 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
            event, yaml.CollectionEndEvent
        )
        if depth > 20 or isinstance(event, yaml.AliasEvent):
            raise ValueError(
                f"line {event.start_mark.line + 1} of {path.name} is nested too deeply or has an alias"
            )
    return yaml.safe_load(text)


def read_bundle(folder: Path) -> list[IclTask]:
    """The tasks in core.yaml with the baselines in eval_meta_data.csv. UserError if a file is missing or malformed."""
    try:
        listed = _read_yaml(folder / "core.yaml")["icl_tasks"]
        check_regular(folder / "eval_meta_data.csv", YAML_BYTES)
        with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as f:
            percent = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(f)}
        tasks = [
            IclTask(
                label=entry["label"],
                kind=str(entry["icl_task_type"]),
                path=folder / "eval_data" / entry["dataset_uri"],
                shots=int(entry["num_fewshot"][0]),
                delimiter=entry.get("continuation_delimiter", " "),
                baseline=percent[entry["label"]] / 100,
            )
            for entry in listed
        ]
    except (
        OSError,
        yaml.YAMLError,
        KeyError,
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
    ) as broken:
        raise UserError(
            f"the eval bundle in {folder} differs from the published one ({broken!r}): replace it with a fresh copy of "
            f"{BUNDLE_URL}"
        ) from broken
    for task in tasks:
        if task.kind not in FIELDS:
            raise UserError(
                f"{task.label} in {folder / 'core.yaml'}: icl_task_type must be one of {', '.join(FIELDS)}, got "
                f"{task.kind}. Correct it, or remove the task"
            )
        if not 0 <= task.shots <= MOST_SHOTS:
            raise UserError(
                f"{task.label} in {folder / 'core.yaml'}: num_fewshot must be 0 to {MOST_SHOTS}, got {task.shots}. "
                "Correct it, or remove the task"
            )
        if not task.path.is_file():
            raise UserError(
                f"{task.label} in {folder / 'core.yaml'}: there is no file {task.path}. Copy it from the published "
                "bundle, or remove the task"
            )
    return tasks


def read_problems(task: IclTask, limit: int | None = None) -> list[dict[str, Any]]:
    """The first `limit` problems of a task in upstream's shuffled order. UserError if a problem lacks a field."""
    problems = []
    with open(task.path, "rb") as f:
        for n, line in enumerate(f, start=1):
            try:
                problem = parse_json(line)
                options = {"multiple_choice": "choices", "schema": "context_options"}.get(task.kind)
                missing = [field for field in FIELDS[task.kind] if field not in problem]
                if missing or (options and problem["gold"] not in range(len(problem[options]))):
                    raise ValueError(
                        f"{', '.join(missing)} missing"
                        if missing
                        else "gold is not the index of an option"
                    )
            except (ValueError, TypeError) as broken:
                raise UserError(
                    f"{task.path}, line {n}: {broken}. Correct the line, or replace the file"
                ) from broken
            problems.append(problem)
    random.Random(SHUFFLE_SEED).shuffle(problems)
    problems = problems[:limit]
    if len(problems) <= task.shots:
        raise UserError(
            f"{task.label} shows {task.shots} examples before each problem, so it needs more than {task.shots} "
            f"problems, got {len(problems)}: raise --max_per_task, or leave the flag out"
        )
    return problems


# --- prompts -------------------------------------------------------------------------------------


def choose_examples(count: int, number: int, shots: int) -> list[int]:
    """The indices of the problems to show before problem `number` of `count`, drawn as upstream does, without it."""
    draw = random.Random(EXAMPLES_SEED + number).sample(range(count - 1), shots)
    return [other + (other >= number) for other in draw]


def _example(task: IclTask, problem: dict[str, Any]) -> str:
    """A solved problem, as the prompt shows it before the question."""
    if task.kind == "multiple_choice":
        return f"{problem['query']}{task.delimiter}{problem['choices'][problem['gold']]}\n\n"
    if task.kind == "schema":
        return f"{problem['context_options'][problem['gold']]}{task.delimiter}{problem['continuation']}\n\n"
    return f"{problem['context'].strip()}{task.delimiter}{problem['continuation']}\n\n"


def render(task: IclTask, problem: dict[str, Any], examples: Sequence[dict[str, Any]]) -> list[str]:
    """The prompts of a problem: one per option, or, for language modeling, without and with the continuation."""
    shown = "".join(_example(task, example) for example in examples)
    if task.kind == "multiple_choice":
        return [
            f"{shown}{problem['query']}{task.delimiter}{choice}" for choice in problem["choices"]
        ]
    if task.kind == "schema":
        contexts = problem["context_options"]
        return [
            f"{shown}{context}{task.delimiter}{problem['continuation']}" for context in contexts
        ]
    question = f"{shown}{problem['context'].strip()}{task.delimiter}"
    # Strip the delimiter's space: with the continuation, that space is part of the continuation's first token.
    return [question.strip(), f"{question}{problem['continuation']}"]


def common_prefix(rows: list[list[int]]) -> int:
    """The number of tokens that all rows have in common at the start."""
    shortest, longest = (
        min(rows),
        max(rows),
    )  # in lexicographic order, so every other row lies between these
    for i, (a, b) in enumerate(zip(shortest, longest, strict=False)):
        if a != b:
            return i
    return min(len(shortest), len(longest))


def make_rows(kind: str, question: int, prompts: list[list[int]]) -> list[PromptRow]:
    """The rows to run for one problem. Each prompt begins with BOS.

    The scored tokens are the ones after the common start of all prompts or, for schema, the common end. At least the
    last token is scored, even if one option is the beginning of another.
    """
    if kind == "schema":
        same = common_prefix([tokens[::-1] for tokens in prompts])
        return [
            PromptRow(question, tokens, max(1, len(tokens) - max(1, same))) for tokens in prompts
        ]
    start = common_prefix(prompts)
    scored = prompts[1:] if kind == "language_modeling" else prompts
    return [PromptRow(question, tokens, max(1, min(start, len(tokens) - 1))) for tokens in scored]


# --- scores --------------------------------------------------------------------------------------


def judge(
    task: IclTask,
    problems: Sequence[dict[str, Any]],
    numbers: Sequence[int],
    model: Model,
    tokenizer: Tokenizer,
    tokens_per_batch: int,
    records: Records | None = None,
) -> list[bool]:
    """Whether the model solves each of the problems at these indices; `records` gets a record of each."""
    prompts = []
    for number in numbers:
        examples = [problems[i] for i in choose_examples(len(problems), number, task.shots)]
        prompts.append(render(task, problems[number], examples))
    encoded = iter(tokenizer.encode_batch([text for group in prompts for text in group]))
    rows: list[PromptRow] = []
    for question, group in enumerate(prompts):
        rows += make_rows(task.kind, question, [[tokenizer.bos, *next(encoded)] for _ in group])
    greedy = task.kind == "language_modeling"
    scores = score_rows(model, rows, tokenizer.bos, tokens_per_batch, greedy=greedy)
    grouped: list[list[int]] = [[] for _ in prompts]  # the numbers of the rows of each problem
    for i, row in enumerate(rows):
        grouped[row.question].append(i)
    right = []
    for number, group in zip(numbers, grouped, strict=True):
        losses = [scores[i].mean_loss for i in group]
        answer, gold = losses.index(min(losses)), problems[number].get("gold")
        right.append(losses == [0.0] if greedy else answer == gold)
        if records:
            some = [rows[i] for i in group]
            about = {"id": number, "prompt": some[0].tokens[: min(row.start for row in some)]}
            if greedy:
                records.add(
                    number,
                    {**about, "expected": problems[number]["continuation"], "right": right[-1]},
                )
            else:
                logprobs = [[scores[i].logprob, scores[i].tokens] for i in group]
                records.add(
                    number, {**about, "expected": gold, "answer": answer, "logprobs": logprobs}
                )
    return right


def evaluate_task(
    model: Model,
    tokenizer: Tokenizer,
    task: IclTask,
    compute: Compute,
    limit: int | None = None,
    tokens_per_batch: int = 16384,
    records: Records | None = None,
) -> TaskScore:
    """The accuracy of an unsharded model on a task. Each rank evaluates its share of the problems.

    With `records` of an earlier evaluation of the same, the accuracy is read from them. UserError on every rank if one
    of them finds a broken problem, or a loss that is not finite.
    """
    before = records.finished() if records else None
    if records and parallel.least(int(before is not None), compute) and before is not None:
        return TaskScore(**before)
    begin = time.perf_counter()
    right = 0
    with parallel.together(task.label, compute):
        problems = read_problems(task, limit)
        mine = range(compute.rank, len(problems), compute.world_size)
        for i in range(0, len(mine), PROBLEMS_AT_ONCE):
            some = mine[i : i + PROBLEMS_AT_ONCE]
            right += sum(judge(task, problems, some, model, tokenizer, tokens_per_batch, records))
    accuracy = parallel.total([float(right)], compute)[0] / len(problems)
    centered = (accuracy - task.baseline) / (1 - task.baseline)
    score = TaskScore(task.label, accuracy, centered, len(problems), time.perf_counter() - begin)
    if records:
        records.finish(asdict(score))
    return score


def evaluate_core(
    model: Model,
    tokenizer: Tokenizer,
    folder: Path,
    compute: Compute,
    limit: int | None = None,
    tokens_per_batch: int = 16384,
    records: Callable[[IclTask], Records] | None = None,
) -> Core:
    """Evaluate every task of a bundle, at most `limit` problems each, and log one line per task.

    `tokens_per_batch` limits the memory: it is the most positions, padding included, in one pass of the model.
    `records` makes the file of a task's answers. A broken task gets a warning and the others go on; UserError if all
    are broken.
    """
    scores: list[TaskScore] = []
    broken: list[str] = []
    tasks = read_bundle(folder)
    for n, task in enumerate(tasks, start=1):
        try:
            answers = records(task) if records else None
            score = evaluate_task(model, tokenizer, task, compute, limit, tokens_per_batch, answers)
        except UserError as why:
            if len(broken) == len(tasks) - 1:
                raise
            warn(f"{task.label} is left out: {why}")
            broken.append(task.label)
            continue
        scores.append(score)
        log(
            f"CORE {n:2}/{len(tasks)} {task.label:<34} {task.shots:2}-shot | accuracy {score.accuracy:.4f} | centered "
            f"{score.centered:+.4f} | {score.problems} problems, {score.seconds:.1f} s"
        )
    core = None if broken else sum(score.centered for score in scores) / len(scores)
    return Core(tuple(scores), core, tuple(broken))
