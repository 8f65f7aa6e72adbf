"""Evaluate a chat model by the share of problems that it solves in each task.

python -m scripts.chat_eval                   # the latest stage, on the tasks that suit its corpus
python -m scripts.chat_eval -i sft -a "ARC-Easy|GSM8K"
python -m scripts.chat_eval -a "C-Eval|CMMLU|MGSM-zh" --task_data DIR    # from copies of the tasks
python -m scripts.chat_eval --model ./Qwen3-0.6B -a "ARC-Easy|GSM8K" --by=both
torchrun --standalone --nproc_per_node=8 -m scripts.chat_eval -- -i sft
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from tyro.conf import arg

from nanochat.checkpoint_manager.load import PUBLISHED, Loaded
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, log, read_json, tr, warn
from nanochat.data.command_line import run
from nanochat.data.conversation import Part, Task, words
from nanochat.data.traits import Drawing, traits
from nanochat.device import Compute, with_compute
from nanochat.evals.chat import Score, by_group, chat_core, evaluate, wilson
from nanochat.evals.choices import ChoiceScore, ClozeTask, choice_facts, evaluate_choices
from nanochat.evals.measured import MeasuredFlags
from nanochat.evals.records import Records, fingerprint, records_dir, unfinished
from nanochat.generate.sampling import Sampling
from nanochat.report.sections import report_dir, write_section
from nanochat.runtime import graphs, parallel
from nanochat.runtime.samples import Sample, keep_samples
from tasks.catalogue import chat_tasks, choice_tasks, use_task_data
from tasks.mixtures import CURRICULA, curriculum

SAMPLES = 6  # replies of each task that the report shows
MANY_CUTS = 0.05  # the share of cut replies from which on a warning is given


@dataclass(frozen=True)
class Config(MeasuredFlags):
    """Evaluate a chat model by the share of problems that it solves in each task."""

    task_name: Annotated[str | None, arg(aliases=["-a"])] = None
    """Tasks to evaluate, with | between their names.
    Default: the tasks that suit the corpus of the model."""
    temperature: Annotated[float | None, arg(aliases=["-t"])] = None
    """Randomness of the replies: 0 always takes the likeliest token. Raise it for several samples.
    Default: 0, but stories are drawn as a chat draws them,
    since all would be one story otherwise."""
    max_new_tokens: Annotated[int, arg(aliases=["-m"])] = 512
    """Longest reply, in tokens."""
    num_samples: Annotated[int, arg(aliases=["-n"])] = 1
    """Replies to each problem; a problem counts as right if one of them is.
    Needs a temperature above 0."""
    top_k: Annotated[int, arg(aliases=["-k"])] = 50
    """Sample from the k likeliest tokens; 0 samples from all."""
    min_p: float | None = None
    """Never draw a token less likely than this share of the likeliest, 0 to 1;
    0 draws from all of top_k.
    Default: 0, and for stories as in a chat. Chats with a TinyWorld model take 0.5,
    at temperature 1."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """Problems or replies to compute together on each device.
    Lower it if the device runs out of memory."""
    by: Literal["letters", "likelihood", "both"] = "letters"
    """How multiple choice is answered; letters: in a chat, by the likeliest letter.
    likelihood: by the likeliest continuation of the plain question,
    as acc and acc_norm of lm-evaluation-harness."""
    max_problems: Annotated[int | None, arg(aliases=["-x"])] = None
    """Most problems to ask of each task. Default: all. Lower it for a quick look."""
    shots: int | None = None
    """Examples to show before each problem of C-Eval, CMMLU, MMLU-Pro and MGSM-zh; 0 shows none.
    Default: as many as their authors show. The tasks of ChatCORE show none."""
    task_data: str | None = None
    """Folder with copies of the tasks' data sets, for a machine without a network.
    Default: NANOCHAT_TASK_DIR."""
    once: bool = False
    """Skip the tasks whose figures, of this checkpoint, these flags, this data and these graders,
    are already in the report."""
    again: bool = False
    """Evaluate tasks again whose answers, of this checkpoint, these flags and this data,
    are kept already."""
    show: int = 0
    """Number of wrong replies to print for each task."""
    unsafe_exec: bool = False
    """HumanEval: run the model's programs even if this machine cannot isolate them.
    They can then read your files."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = (
        "auto"
    )
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    graphs: bool | None = None
    """Replay every decoding step as one captured launch, on an NPU or a GPU. Default: on one GPU.
    An NPU needs TASK_QUEUE_ENABLE=1."""
    device_type: str = ""
    """Device to use: npu, cuda, mps or cpu. Default: the first usable one, except mps."""


def choose_tasks(
    task_names: str | None,
    corpus: str | None,
    unsafe_exec: bool,
    compute: Compute,
    shots: int | None = None,
) -> tuple[list[Task], list[str]]:
    """Return the tasks to evaluate, and the names of requested tasks that cannot be read.

    `task_names` has | between names. If it is None, all tasks that suit the corpus are requested,
    and no names are returned. Raises UserError if a name is unknown (exit code 2) or no task can be
    read.
    """
    makers: Mapping[str, Callable[[], Task]] = chat_tasks(unsafe_exec, shots)
    if task_names is None:
        names = list(curriculum(corpus).measures(unsafe_exec))
    else:
        names = [name.strip() for name in task_names.split("|") if name.strip()]
        if not names or any(name not in makers for name in names):
            raise UserError(
                tr(
                    "--task_name takes {makers}, with | between several; got {task_names!r}",
                    makers=", ".join(makers),
                    task_names=task_names,
                ),
                2,
            )
    tasks: list[Task] = []
    missing: list[str] = []
    for name in names:
        try:
            with parallel.together(name, compute):
                task = makers[name]()
        except UserError as why:
            if len(names) == 1:
                raise
            warn(tr("{name} is left out: {why}", name=name, why=why))
            missing.append(name)
        else:
            tasks.append(task)
    if not tasks:
        raise UserError(
            tr(
                "none of the tasks can be evaluated here: the warnings above say what each "
                "task needs"
            ),
            2,
        )
    return tasks, [] if task_names is None else missing


class Listener:
    """Keeps the first replies to a task for the report, and logs the first wrong ones."""

    def __init__(self, task: Task, show: int):
        self.task = task
        self.show = show
        self.samples: list[dict[str, Any]] = []

    def hear(self, i: int, parts: list[Part], grade: float) -> None:
        """Receive the reply to problem `i` and its grade.

        The first 6 replies (SAMPLES) are kept, and the first `show` wrong ones are logged.
        """
        is_sample = len(self.samples) < SAMPLES
        is_shown = self.show > 0 and grade < 1
        if not is_sample and not is_shown:
            return
        question = self._question(i)
        reply = words(parts)
        if is_sample:
            self.samples.append({"question": question, "reply": reply, "grade": grade})
        if is_shown:
            self.show -= 1
            expected = words(self.task[i].messages[-1].parts)
            log(
                tr(
                    "  wrong: {question!r} -> {reply!r}, expected {expected!r}",
                    question=question,
                    reply=reply,
                    expected=expected,
                )
            )

    def _question(self, i: int) -> str:
        messages = self.task[i].prompt.messages
        if getattr(self.task, "shots", 0):
            messages = messages[-1:]  # examples are not part of the question
        return "\n".join(message.text for message in messages)


def sampling_for(task: Task | None, cfg: Config, corpus: str | None) -> Sampling:
    """Return the Sampling for the replies to a task.

    The flags decide. Without them, decoding is greedy unless the task asks to sample as a chat
    does. Raises UserError (exit code 2) if a flag is out of range, even if `task` is None.
    """
    chat = traits(corpus).chats if getattr(task, "drawn", False) else Drawing(temperature=0.0)
    temperature = chat.temperature if cfg.temperature is None else cfg.temperature
    min_p = chat.min_p if cfg.min_p is None else cfg.min_p
    return Sampling(temperature, cfg.top_k or None, cfg.max_new_tokens, min_p=min_p)


def figures(
    task: Task,
    score: Score,
    seconds: float,
    samples: list[dict[str, Any]],
    records: Records,
) -> dict[str, Any]:
    """Return a dict with the scores, counts, time and samples of a task, for the report."""
    groups = {}
    for name, (right, total) in by_group(task, score).items():
        groups[name] = {"right": right, "total": total}
    return {
        "accuracy": score.accuracy,
        "right": score.right,
        "total": score.total,
        "low": score.low,
        "high": score.high,
        "baseline": score.baseline,
        "too_long": score.too_long,
        "cut_off": score.cut_off,
        "seconds": seconds,
        "groups": groups,
        "samples": samples,
        "answers": records.path.name,
    }


def settings(cfg: Config, dtype: torch.dtype) -> dict[str, Any]:
    """Return a dict of the settings on which scores depend, besides the model and the data."""
    return {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "min_p": cfg.min_p,
        "samples": cfg.num_samples,
        "limit": cfg.max_problems,
        "tokens": cfg.max_new_tokens,
        "shots": cfg.shots,
        "dtype": str(dtype),
    }


def saved_section(
    loaded: Loaded,
    sampling: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the stage's section of the report if it was made with these weights and settings.

    Otherwise, returns a new section without tasks. A setting that a section of an earlier version
    does not name is taken from `defaults`.
    """
    about = {
        "tag": loaded.tag,
        "step": loaded.step,
        "model": loaded.weights[:16],
        "sampling": dict(sampling),
    }
    path = report_dir() / "sections" / f"{loaded.stage}_eval.json"
    section = read_json(path) if path.exists() else {}
    section["sampling"] = {**defaults, **section.get("sampling", {})}
    if all(section.get(name) == value for name, value in about.items()):
        return section
    return {**about, "tasks": {}, "chat_core": None}


def save_figures(
    loaded: Loaded,
    sampling: Mapping[str, Any],
    defaults: Mapping[str, Any],
    tasks: Mapping[str, Any],
) -> None:
    """Add the figures of tasks to the stage's section of the report, and save their samples.

    ChatCORE is added as soon as all its tasks are there. Figures of another checkpoint or of other
    settings are dropped.
    """
    old_section = saved_section(loaded, sampling, defaults)
    section = {**old_section, "tasks": {**old_section["tasks"], **tasks}, "chat_core": None}
    published = CURRICULA["published"].measures(False)
    if set(published) <= set(section["tasks"]):
        scores = [section["tasks"][name] for name in published]
        section["chat_core"] = chat_core((score["accuracy"], score["baseline"]) for score in scores)
    if section == old_section:
        return
    if section["chat_core"] is not None:
        log(f"ChatCORE: {section['chat_core']:.4f}")
    write_section(f"{loaded.stage}_eval", section)
    samples = []
    for name, task_figures in tasks.items():
        for row in task_figures["samples"]:
            samples.append(Sample(loaded.step, name, row["question"], row["reply"], row["grade"]))
    if loaded.stage != PUBLISHED:  # samples are kept beside the checkpoints of a run
        keep_samples(checkpoint_dir(loaded.stage, loaded.tag), samples)


def by_likelihood(task: Task, cfg: Config) -> bool:
    """Return whether a task is measured by the likelihood of its choices."""
    return task.kind == "choice" and cfg.by != "letters"


def by_replies(task: Task, cfg: Config) -> bool:
    """Return whether a task is measured in a chat: by letters or, without choices, by replies."""
    return task.kind != "choice" or cfg.by != "likelihood"


def likelihood_records(
    cfg: Config,
    name: str,
    loaded: Loaded,
    compute: Compute,
) -> tuple[ClozeTask, Records]:
    """Return a task as it is measured by likelihood, and the records of its answers.

    Raises UserError on every rank if a problem is malformed.
    """
    with parallel.together(name, compute):
        task = choice_tasks(cfg.shots)[name]()
        facts = choice_facts(task, cfg.max_problems)
    run_settings = {"limit": cfg.max_problems, "dtype": str(compute.dtype)}
    about = {"model": loaded.weights, "settings": run_settings, **facts}
    folder = records_dir(loaded.stage, loaded.tag, loaded.step)
    return task, Records(folder, f"{name} likelihood", about, compute)


def measure_likelihood(
    cfg: Config,
    task: ClozeTask,
    loaded: Loaded,
    records: Records,
    compute: Compute,
) -> ChoiceScore:
    """Measure a task by the likelihood of its choices, as base_eval --tasks does.

    Writes a record of every answer to a file; a score that an earlier evaluation saved there is
    returned instead, unless --again is set. Raises UserError on every rank if there is nothing to
    evaluate or a problem is malformed.
    """
    saved_score = None if cfg.again else records.saved_score()
    if parallel.least(int(saved_score is not None), compute) and saved_score is not None:
        log(
            tr(
                "{name}: done before, as {path} says; --again evaluates it again",
                name=task.name,
                path=records.path,
            )
        )
        return ChoiceScore(**saved_score)
    tokens = cfg.batch_size * loaded.row_tokens
    return evaluate_choices(
        task, loaded.model, loaded.tokenizer, compute, tokens, cfg.max_problems, records
    )


def likelihood_figures(
    score: ChoiceScore,
    seconds: float,
    records: Records,
) -> dict[str, Any]:
    """Return the figures of `<task> acc` and `<task> acc_norm` for the report, by these names."""
    rows = {}
    for measure in ("acc", "acc_norm"):
        accuracy = getattr(score, measure)
        right = accuracy * score.total
        low, high = wilson(right, score.total)
        rows[f"{score.name} {measure}"] = {
            "accuracy": accuracy,
            "right": right,
            "total": score.total,
            "low": low,
            "high": high,
            "baseline": score.baseline,
            "too_long": score.too_long,
            "seconds": seconds,
            "groups": {},
            "samples": [],
            "answers": records.path.name,
        }
    return rows


def reply_records(
    cfg: Config,
    task: Task,
    loaded: Loaded,
    sampling: Sampling,
    run_settings: Mapping[str, Any],
    compute: Compute,
) -> Records:
    """Return the records of the answers to a task in a chat.

    Raises UserError on every rank if a problem is malformed.
    """
    with parallel.together(task.name, compute):
        data = fingerprint(task, cfg.max_problems) if compute.main else ""
    task_settings = {
        **run_settings,
        "temperature": sampling.temperature,
        "min_p": sampling.min_p,
        "shots": getattr(task, "shots", 0),
    }
    if cfg.graphs:
        task_settings["graphs"] = True
    about = {"model": loaded.weights, "settings": task_settings, "data": data}
    folder = records_dir(loaded.stage, loaded.tag, loaded.step)
    return Records(folder, task.name, about, compute)


def measure(
    cfg: Config,
    task: Task,
    loaded: Loaded,
    sampling: Sampling,
    records: Records,
    listener: Listener,
    compute: Compute,
) -> Score | None:
    """Evaluate a task, write a record of every answer to a file, and return the score.

    If an earlier evaluation with the same model, settings and data has saved a score, rank 0
    returns it, and the other ranks return None, unless --again is set. Raises UserError on every
    rank if there is nothing to evaluate.
    """
    saved_score = records.saved_score() if compute.main and not cfg.again else None
    if parallel.agree(int(saved_score is not None), compute):
        if saved_score is None:
            return None
        log(
            tr(
                "{name}: done before, as {path} says; --again evaluates it again",
                name=task.name,
                path=records.path,
            )
        )
        listener.samples = saved_score.pop("replies")
        saved_score["grades"] = tuple(map(tuple, saved_score["grades"]))
        return Score(**saved_score)
    score = evaluate(
        task,
        loaded.model,
        loaded.tokenizer,
        compute,
        sampling,
        cfg.num_samples,
        cfg.max_problems,
        cfg.batch_size,
        listener.hear if compute.main else None,
        records.add,
        bool(cfg.graphs),
    )
    records.finish({**asdict(score), "replies": listener.samples})
    return score


def warn_of_cuts(score: Score, cfg: Config) -> bool:
    """Warn if many replies were cut off, most of which are then graded as wrong; return whether."""
    replies = score.total * cfg.num_samples
    if score.cut_off < MANY_CUTS * replies:
        return False
    warn(
        tr(
            "{count:,} of {replies:,} replies were cut off at --max_new_tokens={tokens} or at the "
            "end of the context, and an answer that was not reached counts as wrong. Raise it: "
            "a model that thinks before it answers needs thousands of tokens",
            count=score.cut_off,
            replies=replies,
            tokens=cfg.max_new_tokens,
        )
    )
    return True


def chat_eval(cfg: Config, compute: Compute) -> dict[str, Score | ChoiceScore]:
    """Evaluate the tasks one by one, add them to the report, and return their scores by name.

    A score by likelihood has the name of its task and " likelihood". The dict lacks tasks that
    --once skips and, except on rank 0, tasks that were evaluated before.
    Raises UserError at the end if some of the tasks could not be evaluated.
    """
    if cfg.num_samples > 1 and not cfg.temperature:
        raise UserError(
            tr(
                "--num_samples above 1 needs --temperature above 0, such as --temperature=1: "
                "else all samples are equal"
            ),
            2,
        )
    defaults = settings(Config(), compute.dtype)
    compute = compute.in_format(cfg.dtype)
    cfg = replace(cfg, graphs=graphs.for_replies(cfg.graphs, compute) is not None)
    sampling_for(None, cfg, None)  # refuses bad flags before the model is loaded
    loaded = cfg.load(compute)
    compute.operations.serve(loaded.model)
    log(
        tr(
            "model: stage {stage}, tag {tag}, step {step}",
            stage=loaded.stage,
            tag=loaded.tag,
            step=loaded.step,
        )
    )
    use_task_data(cfg.task_data)
    corpus = loaded.meta["config"]["corpus"]
    tasks, broken = choose_tasks(cfg.task_name, corpus, cfg.unsafe_exec, compute, cfg.shots)
    run_settings = settings(cfg, compute.dtype)
    section = saved_section(loaded, run_settings, defaults)["tasks"] if cfg.once else {}
    reported: list[str] = []

    def is_reported(name: str, records: Records) -> bool:
        """Return whether the report has the figures of exactly these answers."""
        answers = section.get(name, {}).get("answers")
        if not parallel.agree(int(answers == records.path.name), compute):
            return False
        reported.append(name)
        return True

    scores: dict[str, Score | ChoiceScore] = {}
    new_figures: dict[str, Any] = {}
    warned = False  # each task's score says how many replies were cut off
    for task in tasks:
        try:
            if by_replies(task, cfg):
                start = time.monotonic()
                listener = Listener(task, cfg.show)
                sampling = sampling_for(task, cfg, corpus)
                records = reply_records(cfg, task, loaded, sampling, run_settings, compute)
                score = None
                if not is_reported(task.name, records):
                    score = measure(cfg, task, loaded, sampling, records, listener, compute)
                if score is not None:
                    scores[task.name] = score
                    log(str(score))
                    warned = warned or warn_of_cuts(score, cfg)
                    seconds = time.monotonic() - start
                    task_figures = figures(task, score, seconds, listener.samples, records)
                    new_figures[task.name] = task_figures
            if by_likelihood(task, cfg):
                start = time.monotonic()
                choices, records = likelihood_records(cfg, task.name, loaded, compute)
                if is_reported(f"{task.name} acc", records):
                    continue
                choice_score = measure_likelihood(cfg, choices, loaded, records, compute)
                scores[f"{task.name} likelihood"] = choice_score
                log(str(choice_score))
                new_figures |= likelihood_figures(choice_score, time.monotonic() - start, records)
        except UserError as why:
            if len(tasks) == 1:
                raise
            warn(tr("{name} is left out: {why}", name=task.name, why=why))
            broken.append(task.name)
    if reported:
        log(tr("in the report already: {reported}", reported=", ".join(reported)))
    if scores:
        log(
            tr(
                "answers: {folder}",
                folder=records_dir(loaded.stage, loaded.tag, loaded.step),
            )
        )
    if compute.main and (new_figures or reported):
        save_figures(loaded, run_settings, defaults, new_figures)
    if broken:
        raise unfinished(broken)
    return scores


if __name__ == "__main__":
    run(with_compute(chat_eval), Config, __doc__)
