"""Evaluates CORE, the mean accuracy above chance over 22 zero-shot and few-shot tasks.

CORE comes from DCLM (Li et al. 2024, arXiv:2406.11794). Problems, few-shot examples and prompts are
the same as in upstream nanochat, so that results can be compared. Unlike upstream, prompts of many
problems share a batch, and logits are computed only for the positions that are scored.
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
    tr,
    warn,
)
from nanochat.data.library_words import in_words
from nanochat.data.sources import download
from nanochat.device import Compute
from nanochat.evals.likelihood import (
    PromptRow,
    common_prefix,
    score_rows,
    shown_tokens,
    tokens_read,
)
from nanochat.evals.records import Records
from nanochat.model import Model
from nanochat.runtime import parallel, signals
from nanochat.tokenizer import Tokenizer

MAX_SHOTS = 100
MAX_YAML_BYTES = 1 << 20  # the published core.yaml takes 3 kB
BUNDLE_URL = "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"
MAX_PACKED_BYTES = 500_000_000  # the published bundle takes 162 MB
MAX_UNPACKED_BYTES = 2_000_000_000
MAX_FILES = 1_000
SHUFFLE_SEED = 1337  # both seeds are the same as upstream's
EXAMPLES_SEED = 1234
PROBLEMS_AT_ONCE = 256  # the number of problems to render, tokenise and sort by length together
COUNTED_PROBLEMS = 8  # problems of each task whose length stands for all

# Kind of task -> the fields of its problems. `gold` is the index of the correct choice or context.
FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
OPTIONS_FIELD = {"multiple_choice": "choices", "schema": "context_options"}


@dataclass(frozen=True)
class IclTask:
    """An in-context-learning task of the bundle; `baseline` is the accuracy of random guessing."""

    label: str
    kind: str
    path: Path
    shots: int
    delimiter: str
    baseline: float


@dataclass(frozen=True)
class TaskScore:
    """The accuracy on a task over all ranks, and the `seconds` that its evaluation took.

    `centered` is the accuracy rescaled so that guessing is 0 and perfection is 1.
    """

    label: str
    accuracy: float
    centered: float
    problems: int
    seconds: float


@dataclass(frozen=True)
class Core:
    """The scores of all tasks that could be evaluated, and their mean `centered` accuracy, CORE.

    `broken` holds the labels of the other tasks. If there are any, `core` is None.
    """

    tasks: tuple[TaskScore, ...]
    core: float | None
    broken: tuple[str, ...] = ()


# --- the bundle ----------------------------------------------------------------------------------


def find_bundle(path: str | Path | None = None) -> Path | None:
    """Return the folder of the eval bundle, which is `path` or, by default, <base>/eval_bundle.

    Return None if `path` is None and the default folder does not exist. Raises UserError (exit code
    2) if the folder has no core.yaml.
    """
    if path is None:
        folder = base_dir() / "eval_bundle"
        if not folder.exists():
            return None
        hint = tr("Delete it, then use --download")
    else:
        folder = Path(path).expanduser()
        hint = tr("Name the folder that holds it with --eval_bundle")
    if (folder / "core.yaml").is_file():
        return folder
    raise UserError(
        tr("{folder} is not an eval bundle: it has no core.yaml. {hint}", folder=folder, hint=hint),
        exit_code=2,
    )


def download_bundle(url: str = BUNDLE_URL, patience: download.Patience | None = None) -> Path:
    """Download the published bundle (162 MB) to <base>/eval_bundle, and return that folder.

    The folder only appears once it is complete. Call this on one rank only. Raises UserError if the
    download fails, if the archive is too large or not an eval bundle, or if the folder exists.
    """
    base = base_dir()
    target = base / "eval_bundle"
    if os.path.lexists(target):
        raise UserError(
            tr(
                "{target} exists already. Delete it, then type the same command again",
                target=target,
            )
        )
    archive = base / "eval_bundle.zip"
    hint = tr(
        "On a machine with network, download {url}, and unpack it here as {target}, "
        "or give --eval_bundle its folder",
        url=url,
        target=target,
    )

    def check(path: Path) -> None:
        if not zipfile.is_zipfile(path):
            raise ValueError(tr("not a zip archive"))

    size = download.probe_size(url, {}, patience, hint)
    if size and size > MAX_PACKED_BYTES:
        raise UserError(
            tr(
                "{url} has {size:,} bytes; the bundle has at most {limit:,}. {hint}",
                url=url,
                size=size,
                limit=MAX_PACKED_BYTES,
                hint=hint,
            )
        )
    log(tr("downloading {url}", url=url))
    download.fetch_all(
        [download.Remote(url, archive)], patience=patience, hint=hint, check=check, say=log
    )
    # The publisher gives no hash, so it is logged to let users compare it between machines.
    log(f"{archive.name}: SHA-256 {sha256_of(archive)}")
    with tempfile.TemporaryDirectory(dir=base, prefix=".eval_bundle-") as folder:
        with zipfile.ZipFile(archive) as packed:
            files = packed.infolist()
            unpacked_bytes = sum(file.file_size for file in files)
            if len(files) > MAX_FILES or unpacked_bytes > MAX_UNPACKED_BYTES:
                archive.unlink()
                raise UserError(
                    tr(
                        "{url} unpacks to {files:,} files of {unpacked_bytes:,} "
                        "bytes; the bundle has at most {max_files:,} files of "
                        "{max_unpacked_bytes:,}. {hint}",
                        url=url,
                        files=len(files),
                        unpacked_bytes=unpacked_bytes,
                        max_files=MAX_FILES,
                        max_unpacked_bytes=MAX_UNPACKED_BYTES,
                        hint=hint,
                    )
                )
            packed.extractall(folder)
        core_yaml = next(Path(folder).rglob("core.yaml"), None)
        if core_yaml is None:
            raise UserError(
                tr(
                    "{archive} has no core.yaml: delete it and try again. {hint}",
                    archive=archive,
                    hint=hint,
                )
            )
        os.rename(core_yaml.parent, target)
    fsync_path(base)
    archive.unlink()
    return target


def _read_yaml(path: Path) -> Any:
    """Return the content of a YAML file of at most 1 MiB.

    Raises ValueError or YAMLError if the path is a pipe or device, or if the file is too large,
    malformed, nested too deeply or uses aliases, with which a few lines can expand to billions.
    """
    check_regular(path, MAX_YAML_BYTES)
    text = path.read_text(encoding="utf-8")
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > 20 or isinstance(event, yaml.AliasEvent):
            raise ValueError(
                tr(
                    "line {line} of {name} is nested too deeply or has an alias",
                    line=event.start_mark.line + 1,
                    name=path.name,
                )
            )
    return yaml.safe_load(text)


def read_bundle(folder: Path) -> list[IclTask]:
    """Return the tasks in core.yaml, with their baselines from eval_meta_data.csv.

    Raises UserError if a file is missing or malformed.
    """
    try:
        task_settings = _read_yaml(folder / "core.yaml")["icl_tasks"]
        baselines = _read_baselines(folder / "eval_meta_data.csv")
        tasks = [
            IclTask(
                label=str(settings["label"]),
                kind=str(settings["icl_task_type"]),
                path=folder / "eval_data" / settings["dataset_uri"],
                shots=int(settings["num_fewshot"][0]),
                delimiter=settings.get("continuation_delimiter", " "),
                baseline=baselines[settings["label"]],
            )
            for settings in task_settings
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
            tr(
                "the eval bundle in {folder} differs from the published one ({broken!r}): "
                "replace it with a fresh copy of {bundle_url}",
                folder=folder,
                broken=broken,
                bundle_url=BUNDLE_URL,
            )
        ) from broken
    if not tasks:
        raise UserError(
            tr(
                "{path} lists no task. Copy it from the published bundle",
                path=folder / "core.yaml",
            )
        )
    data = (folder / "eval_data").resolve()
    for task in tasks:
        _check_task(task, data, tr("{task} in {path}", task=task.label, path=folder / "core.yaml"))
    return tasks


def _read_baselines(path: Path) -> dict[str, float]:
    """Return the accuracy of random guessing on each task, as a fraction, by the task's label."""
    check_regular(path, MAX_YAML_BYTES)
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in rows}


def _check_task(task: IclTask, data: Path, place: str) -> None:
    """Raise UserError if a task of core.yaml cannot be evaluated.

    Its file must be in the folder `data`. `place` begins the message.
    """
    if task.kind not in FIELDS:
        raise UserError(
            tr(
                "{place}: icl_task_type must be one of {fields}, got {kind}. Correct it, or "
                "remove the task",
                place=place,
                fields=", ".join(FIELDS),
                kind=task.kind,
            )
        )
    if not 0 <= task.shots <= MAX_SHOTS:
        raise UserError(
            tr(
                "{place}: num_fewshot must be 0 to {max_shots}, got {shots}. Correct it, or "
                "remove the task",
                place=place,
                max_shots=MAX_SHOTS,
                shots=task.shots,
            )
        )
    if not 0 <= task.baseline < 1:
        raise UserError(
            tr(
                "{place}: the random baseline must be 0 to below 100, got {baseline:g}. "
                "Correct it in eval_meta_data.csv, or remove the task",
                place=place,
                baseline=100 * task.baseline,
            )
        )
    if not task.path.resolve().is_relative_to(data):
        raise UserError(
            tr(
                "{place}: dataset_uri must name a file in {data}, got {path}. Correct it, "
                "or remove the task",
                place=place,
                data=data,
                path=task.path,
            )
        )
    if not task.path.is_file():
        raise UserError(
            tr(
                "{place}: there is no file {path}. Copy it from the published bundle, or "
                "remove the task",
                place=place,
                path=task.path,
            )
        )


def read_problems(task: IclTask, limit: int | None = None) -> list[dict[str, Any]]:
    """Shuffle a task's problems as upstream does, and return the first `limit` (None: all).

    Raises UserError if a problem is malformed, or if there are too few to show `task.shots`
    others before each.
    """
    problems = []
    with open(task.path, "rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                problem = parse_json(line)
                _check_problem(task.kind, problem)
            except (ValueError, TypeError) as failure:
                raise UserError(
                    tr(
                        "{path}, line {number}: {failure}. Correct the line, or replace the file",
                        path=task.path,
                        number=number,
                        failure=in_words(failure),
                    )
                ) from failure
            problems.append(problem)
    random.Random(SHUFFLE_SEED).shuffle(problems)
    problems = problems[:limit]
    if len(problems) <= task.shots:
        raise UserError(
            tr(
                "{label} shows {shots} examples before each problem, so it needs more than "
                "{shots} problems, got {count}: raise --max_per_task, or leave the "
                "flag out",
                label=task.label,
                shots=task.shots,
                count=len(problems),
            )
        )
    return problems


def _check_problem(kind: str, problem: dict[str, Any]) -> None:
    """Raise ValueError if a problem lacks a field, or if `gold` is not the index of an option."""
    missing = [field for field in FIELDS[kind] if field not in problem]
    if missing:
        raise ValueError(tr("{fields} missing", fields=", ".join(missing)))
    if kind in OPTIONS_FIELD:
        options = problem[OPTIONS_FIELD[kind]]
        if problem["gold"] not in range(len(options)):
            raise ValueError(tr("gold is not the index of an option"))


Read = Callable[[IclTask, int | None], list[dict[str, Any]]]  # as read_problems(), or a cache of it

# --- prompts -------------------------------------------------------------------------------------


def choose_examples(count: int, number: int, shots: int) -> list[int]:
    """Return the indices of the `shots` few-shot examples for the problem with index `number`.

    They are drawn from all `count` problems except this one, as in upstream.
    """
    drawn = random.Random(EXAMPLES_SEED + number).sample(range(count - 1), shots)
    return [i + 1 if i >= number else i for i in drawn]


def _example(task: IclTask, problem: dict[str, Any]) -> str:
    """Return a problem with its solution, as text to show before the question."""
    if task.kind == "multiple_choice":
        context = problem["query"]
        continuation = problem["choices"][problem["gold"]]
    elif task.kind == "schema":
        context = problem["context_options"][problem["gold"]]
        continuation = problem["continuation"]
    else:
        context = problem["context"].strip()
        continuation = problem["continuation"]
    return f"{context}{task.delimiter}{continuation}\n\n"


def render(
    task: IclTask,
    problem: dict[str, Any],
    examples: Sequence[dict[str, Any]],
) -> list[str]:
    """Return the prompts of a problem, one for each option.

    For language modeling, return two prompts, without and with the continuation.
    """
    examples_text = "".join(_example(task, example) for example in examples)
    if task.kind == "multiple_choice":
        question = f"{examples_text}{problem['query']}{task.delimiter}"
        return [f"{question}{choice}" for choice in problem["choices"]]
    if task.kind == "schema":
        ending = f"{task.delimiter}{problem['continuation']}"
        return [f"{examples_text}{context}{ending}" for context in problem["context_options"]]
    question = f"{examples_text}{problem['context'].strip()}{task.delimiter}"
    # Strip the delimiter's space, which is part of the continuation's first token.
    return [question.strip(), f"{question}{problem['continuation']}"]


def make_rows(
    kind: str,
    question: int,
    prompts: list[list[int]],
) -> list[PromptRow]:
    """Return the rows to score for one problem, given its prompts as tokens that begin with BOS.

    The scored tokens are those after the common prefix of all prompts or, for schema tasks, those
    in the common suffix. At least the last token is scored, even if one option is the beginning of
    another.
    """
    if kind == "schema":
        suffix_length = max(1, common_prefix([tokens[::-1] for tokens in prompts]))
        starts = [max(1, len(tokens) - suffix_length) for tokens in prompts]
    else:
        prefix_length = common_prefix(prompts)
        starts = [max(1, min(prefix_length, len(tokens) - 1)) for tokens in prompts]
    rows = [
        PromptRow(question, tokens, start) for tokens, start in zip(prompts, starts, strict=True)
    ]
    # The prompt without the continuation only shows where the continuation begins.
    return rows[1:] if kind == "language_modeling" else rows


# --- scores --------------------------------------------------------------------------------------


def judge(
    task: IclTask,
    problems: Sequence[dict[str, Any]],
    numbers: Sequence[int],
    model: Model,
    tokenizer: Tokenizer,
    tokens_per_batch: int,
    records: Records | None = None,
    on_batch: Callable[[int], None] = lambda rows: None,
) -> list[bool]:
    """Return whether the model solves each problem whose index is in `numbers`.

    Each answer is added to `records`, if given. `on_batch` is called after every forward pass.
    """
    rows = _rows(task, problems, numbers, tokenizer)
    flat = [row for problem_rows in rows for row in problem_rows]
    greedy = task.kind == "language_modeling"
    scored = score_rows(
        model, flat, tokenizer.bos, tokens_per_batch, greedy=greedy, on_batch=on_batch
    )
    likelihoods = iter(scored)
    verdicts = []
    for number, problem_rows in zip(numbers, rows, strict=True):
        problem = problems[number]
        scores = [next(likelihoods) for _ in problem_rows]
        losses = [score.mean_loss for score in scores]
        record: dict[str, Any] = {"id": number, "prompt": shown_tokens(problem_rows)}
        if greedy:
            correct = losses == [0.0]
            record |= {"expected": problem["continuation"], "right": correct}
        else:
            answer = losses.index(min(losses))
            correct = answer == problem["gold"]
            logprobs = [[score.logprob, score.tokens] for score in scores]
            record |= {"expected": problem["gold"], "answer": answer, "logprobs": logprobs}
        verdicts.append(correct)
        if records:
            records.add(number, record)
    return verdicts


def _rows(
    task: IclTask,
    problems: Sequence[dict[str, Any]],
    numbers: Sequence[int],
    tokenizer: Tokenizer,
) -> list[list[PromptRow]]:
    """Return the rows to score for each problem whose index is in `numbers`."""
    prompts: list[list[str]] = []  # the prompts of each problem
    for number in numbers:
        examples = [problems[i] for i in choose_examples(len(problems), number, task.shots)]
        prompts.append(render(task, problems[number], examples))
    return _encode(task.kind, prompts, tokenizer)


def _encode(
    kind: str,
    prompts: Sequence[Sequence[str]],
    tokenizer: Tokenizer,
) -> list[list[PromptRow]]:
    """Return the rows to score for each problem, after tokenising all prompts in one batch."""
    texts = [text for problem_prompts in prompts for text in problem_prompts]
    encoded = iter(tokenizer.encode_batch(texts))
    rows = []
    for question, problem_prompts in enumerate(prompts):
        token_ids = [[tokenizer.bos, *next(encoded)] for _ in problem_prompts]
        rows.append(make_rows(kind, question, token_ids))
    return rows


def evaluate_task(
    model: Model,
    tokenizer: Tokenizer,
    task: IclTask,
    compute: Compute,
    limit: int | None = None,
    tokens_per_batch: int = 16384,
    records: Records | None = None,
    read: Read = read_problems,
) -> TaskScore:
    """Return an unsharded model's score on the first `limit` problems of a task, over all ranks.

    The ranks divide the problems. If `records` holds, on every rank, the score of an earlier
    evaluation with the same model, settings and data, that score is returned. Raises UserError on
    every rank if any rank finds malformed problems, too few problems or a loss that is not finite,
    and signals.Stopped on every rank if a training run around it is asked to stop.
    """
    if records:
        saved_score = records.saved_score()
        on_all_ranks = parallel.least(int(saved_score is not None), compute)
        if on_all_ranks and saved_score is not None:
            return TaskScore(**saved_score)

    def on_batch(_: int) -> None:
        signals.check_alone(compute)

    begin = time.perf_counter()
    correct = 0
    with parallel.together(task.label, compute):
        problems = read(task, limit)
        rank_numbers = range(compute.rank, len(problems), compute.world_size)
        for i in range(0, len(rank_numbers), PROBLEMS_AT_ONCE):
            numbers = rank_numbers[i : i + PROBLEMS_AT_ONCE]
            verdicts = judge(
                task, problems, numbers, model, tokenizer, tokens_per_batch, records, on_batch
            )
            correct += sum(verdicts)
    (all_correct,) = parallel.total([float(correct)], compute)
    accuracy = all_correct / len(problems)
    centered = (accuracy - task.baseline) / (1 - task.baseline)
    seconds = time.perf_counter() - begin
    score = TaskScore(task.label, accuracy, centered, len(problems), seconds)
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
    log_tasks: bool = True,
    read: Read = read_problems,
) -> Core:
    """Return CORE and the scores of all tasks in a bundle, on at most `limit` problems of each.

    With `log_tasks`, each score is logged. `tokens_per_batch` limits the positions in a forward
    pass, padding included, unless one problem needs more. `records` returns the Records for a
    task's answers, and `read` a task's problems. A task whose evaluation raises UserError is left
    out with a warning, and CORE is then None. If all tasks raise it, so does this function.
    """
    scores: list[TaskScore] = []
    broken: list[str] = []
    tasks = read_bundle(folder)
    for number, task in enumerate(tasks, start=1):
        try:
            answers = records(task) if records else None
            score = evaluate_task(
                model, tokenizer, task, compute, limit, tokens_per_batch, answers, read
            )
        except UserError as why:
            if len(broken) == len(tasks) - 1:
                raise
            warn(tr("{label} is left out: {why}", label=task.label, why=why))
            broken.append(task.label)
            continue
        scores.append(score)
        if not log_tasks:
            continue
        log(
            tr(
                "CORE {number:2}/{count} {label:<34} {shots:2}-shot | accuracy "
                "{accuracy:.4f} | centered {centered:+.4f} | {problems} problems, "
                "{seconds:.1f} s",
                number=number,
                count=len(tasks),
                label=task.label,
                shots=task.shots,
                accuracy=score.accuracy,
                centered=score.centered,
                problems=score.problems,
                seconds=score.seconds,
            )
        )
    core = None if broken else sum(score.centered for score in scores) / len(scores)
    return Core(tuple(scores), core, tuple(broken))


def count_tokens(
    folder: Path, limit: int | None, tokenizer: Tokenizer, read: Read = read_problems
) -> int:
    """Estimate how many tokens a model reads for CORE on `limit` problems of each task.

    The first eight problems (COUNTED_PROBLEMS) of each task are tokenised; the other problems are
    taken to be as long. Raises UserError as evaluate_core() does.
    """
    tokens = 0.0
    for task in read_bundle(folder):
        problems = read(task, limit)
        counted = range(min(len(problems), COUNTED_PROBLEMS))
        rows = [row for rows in _rows(task, problems, counted, tokenizer) for row in rows]
        tokens += tokens_read(rows) / len(counted) * len(problems)
    return round(tokens)
