"""Evaluate a chat model: what share of the problems of each task it solves.

python -m scripts.chat_eval                                   # the latest stage, on the tasks that suit its corpus
python -m scripts.chat_eval -i sft -a "ARC-Easy|GSM8K"
python -m scripts.chat_eval -a "C-Eval|CMMLU|MGSM-zh" --task_data DIR    # from copies that were carried in
torchrun --standalone --nproc_per_node=8 -m scripts.chat_eval -- -i sft
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from tyro.conf import arg

from nanochat.checkpoint_manager.load import Loaded, load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, log, read_json, run, warn
from nanochat.data.conversation import Part, Task
from nanochat.data.traits import Drawing, traits
from nanochat.device import DTYPES, Compute, with_compute
from nanochat.evals.chat import Score, by_group, chat_core, evaluate, words
from nanochat.evals.records import Records, fingerprint, records_dir
from nanochat.generate.sampling import Sampling
from nanochat.report.samples import Sample, keep_samples
from nanochat.report.sections import report_dir, write_section
from nanochat.runtime import graphs, parallel
from tasks.catalogue import chat_tasks, use_task_data
from tasks.mixtures import CURRICULA, curriculum

SAMPLES = 6  # replies of each task to keep for the report


@dataclass(frozen=True)
class Config:
    """Evaluate a chat model: what share of the problems of each task it solves."""

    source: Annotated[Literal["base", "mid", "sft", "rl", "tune"] | None, arg(aliases=["-i"])] = (
        None
    )
    """Stage of the model. Default: the latest one, in the order rl > sft > mid > base."""
    task_name: Annotated[str | None, arg(aliases=["-a"])] = None
    """Tasks to evaluate, with | between their names. Default: the tasks that suit the corpus of the model."""
    temperature: Annotated[float | None, arg(aliases=["-t"])] = None
    """Randomness of the replies: 0 always takes the likeliest token. Raise it for several samples.
    Default: 0, but stories are drawn as a chat draws them, since all would be one story otherwise."""
    max_new_tokens: Annotated[int, arg(aliases=["-m"])] = 512
    """Longest reply, in tokens."""
    num_samples: Annotated[int, arg(aliases=["-n"])] = 1
    """Replies to each problem; a problem counts as right if one of them is. Needs a temperature above 0."""
    top_k: Annotated[int, arg(aliases=["-k"])] = 50
    """Sample from the k likeliest tokens; 0 samples from all."""
    min_p: float | None = None
    """Never draw a token less likely than this share of the likeliest, 0 to 1; 0 draws from all of top_k.
    Default: 0, and for stories as in a chat. Chats with a TinyWorld model take 0.5, at temperature 1."""
    batch_size: Annotated[int, arg(aliases=["-b"])] = 32
    """Problems or replies to compute together on each device. Lower it if the device runs out of memory."""
    model_tag: Annotated[str | None, arg(aliases=["-g"])] = None
    """Tag of the model, such as d20. Default: the newest."""
    step: Annotated[int | None, arg(aliases=["-s"])] = None
    """Step of the checkpoint. Default: the last. Give an earlier step to compare it."""
    max_problems: Annotated[int | None, arg(aliases=["-x"])] = None
    """Most problems to ask of each task. Default: all. Lower it for a quick look."""
    shots: int | None = None
    """Examples to show before each problem of C-Eval, CMMLU, MMLU-Pro and MGSM-zh; 0 shows none.
    Default: as many as their authors show. The tasks of ChatCORE show none."""
    task_data: str | None = None
    """Folder with copies of the tasks' data sets, for a machine without a network. Default: NANOCHAT_TASK_DIR."""
    once: bool = False
    """Skip the tasks whose figures, for this checkpoint and these flags, are already in the report."""
    again: bool = False
    """Evaluate tasks again whose answers, of this checkpoint, these flags and this data, are kept already."""
    show: int = 0
    """Number of wrong replies to print for each task."""
    unsafe_exec: bool = False
    """HumanEval: run the model's programs even if this machine cannot isolate them. They can then read your files."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = (
        "auto"
    )
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    graphs: bool | None = None
    """Replay every decoding step as one captured launch, on an NPU or a GPU. Default: on one GPU.
    An NPU needs TASK_QUEUE_ENABLE=1."""
    device_type: str = ""
    """Device to use: npu, cuda or cpu. Default: the first of these that is usable."""


def choose_tasks(
    asked: str | None,
    corpus: str | None,
    unsafe_exec: bool,
    compute: Compute,
    shots: int | None = None,
) -> tuple[list[Task], list[str]]:
    """The tasks that were named, or all that fit a corpus, and the names of named tasks whose rows cannot be read
    on some rank.

    UserError (code 2) for an unknown name, or if no task is left.
    """
    makers: Mapping[str, Callable[[], Task]] = chat_tasks(unsafe_exec, shots)
    if asked is not None:
        names = [name.strip() for name in asked.split("|") if name.strip()]
        if not names or any(name not in makers for name in names):
            raise UserError(
                f"--task_name takes {', '.join(makers)}, with | between several; got {asked!r}", 2
            )
    else:
        names = list(curriculum(corpus).measures(unsafe_exec))
    tasks: list[Task] = []
    missing: list[str] = []
    for name in names:
        try:
            with parallel.together(name, compute):
                task = makers[name]()
        except UserError as why:
            if len(names) == 1:
                raise
            warn(f"{name} is left out: {why}")
            missing.append(name)
        else:
            tasks.append(task)
    if not tasks:
        raise UserError(
            "none of the tasks can be evaluated here: the warnings above say what each task needs",
            2,
        )
    return tasks, missing if asked is not None else []


class Listener:
    """Keeps the first replies of a task for the report, and prints the first wrong ones."""

    def __init__(self, task: Task, show: int):
        self.task, self.show = task, show
        self.samples: list[dict[str, Any]] = []

    def hear(self, i: int, parts: list[Part], grade: float) -> None:
        """Take the reply to problem `i` and its grade."""
        if len(self.samples) < SAMPLES or (self.show and grade < 1):
            prompt = self.task[i].prompt.messages
            asked = (
                prompt[-1:] if getattr(self.task, "shots", 0) else prompt
            )  # examples are not part of the question
            question = "\n".join(message.text for message in asked)
            if len(self.samples) < SAMPLES:
                self.samples.append({"question": question, "reply": words(parts), "grade": grade})
            if self.show and grade < 1:
                self.show -= 1
                log(
                    f"  wrong: {question!r} -> {words(parts)!r}, expected {words(self.task[i].messages[-1].parts)!r}"
                )


def sampling_for(task: Task | None, cfg: Config, corpus: str | None) -> Sampling:
    """How replies are drawn: as the flags say, else greedily, or as a chat draws them if the task asks for that.
    UserError (code 2) for a flag that is out of range, with any task or without one."""
    chat = traits(corpus).chats if getattr(task, "drawn", False) else Drawing(temperature=0.0)
    temperature = chat.temperature if cfg.temperature is None else cfg.temperature
    min_p = chat.min_p if cfg.min_p is None else cfg.min_p
    return Sampling(temperature, cfg.top_k or None, cfg.max_new_tokens, min_p=min_p)


def figures(
    task: Task, score: Score, seconds: float, samples: list[dict[str, Any]]
) -> dict[str, Any]:
    """The figures of a task for the report."""
    groups = {
        name: {"right": right, "total": total}
        for name, (right, total) in by_group(task, score).items()
    }
    return {
        "accuracy": score.accuracy,
        "right": score.right,
        "total": score.total,
        "low": score.low,
        "high": score.high,
        "baseline": score.baseline,
        "too_long": score.too_long,
        "seconds": seconds,
        "groups": groups,
        "samples": samples,
    }


def settings(cfg: Config, dtype: torch.dtype) -> dict[str, Any]:
    """What figures depend on besides the model and the task's data."""
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


def kept(loaded: Loaded, how: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """The stage's section of the report, or an empty one if that belongs to another checkpoint or other settings. A
    setting that the section of an earlier version does not name has its value in `usual`."""
    about = {
        "tag": loaded.tag,
        "step": loaded.step,
        "model": loaded.weights[:16],
        "sampling": dict(how),
    }
    path = report_dir() / "sections" / f"{loaded.stage}_eval.json"
    before = read_json(path) if path.exists() else {}
    before["sampling"] = {**usual, **before.get("sampling", {})}
    same = all(before.get(name) == value for name, value in about.items())
    return before if same else {**about, "tasks": {}, "chat_core": None}


def keep(
    loaded: Loaded, how: Mapping[str, Any], usual: Mapping[str, Any], tasks: Mapping[str, Any]
) -> None:
    """Add figures to the stage's section of the report, and ChatCORE once the section has all of its tasks; drop the
    figures of another checkpoint or other settings."""
    before = kept(loaded, how, usual)
    section = {**before, "tasks": {**before["tasks"], **tasks}, "chat_core": None}
    published = CURRICULA["published"].measures(False)
    if set(published) <= set(section["tasks"]):
        rows = [section["tasks"][name] for name in published]
        section["chat_core"] = chat_core((row["accuracy"], row["baseline"]) for row in rows)
    if section == before:
        return
    if section["chat_core"] is not None:
        log(f"ChatCORE: {section['chat_core']:.4f}")
    write_section(f"{loaded.stage}_eval", section)
    rows = ((name, row) for name, found in tasks.items() for row in found["samples"])
    said = (
        Sample(loaded.step, name, row["question"], row["reply"], row["grade"]) for name, row in rows
    )
    keep_samples(checkpoint_dir(loaded.stage, loaded.tag), said)


def measure(
    cfg: Config,
    task: Task,
    loaded: Loaded,
    sampling: Sampling,
    how: Mapping[str, Any],
    listener: Listener,
    compute: Compute,
) -> Score | None:
    """The score of a task, and a record of every answer in a file. The score of an earlier call for the same is read
    from its file; ranks other than 0 then get None. UserError on every rank if the task is broken on one of them."""
    with parallel.together(task.name, compute):
        data = fingerprint(task, cfg.max_problems) if compute.main else ""
    about = {
        "model": loaded.weights,
        "settings": {
            **how,
            "temperature": sampling.temperature,
            "min_p": sampling.min_p,
            "shots": getattr(task, "shots", 0),
            **({"graphs": True} if cfg.graphs else {}),
        },
        "data": data,
    }
    records = Records(records_dir(loaded.stage, loaded.tag, loaded.step), task.name, about, compute)
    before = records.saved_score() if compute.main and not cfg.again else None
    if parallel.agree(int(before is not None), compute):
        if before is None:
            return None
        log(f"{task.name}: done before, as {records.path} says; --again evaluates it again")
        listener.samples = before.pop("replies")
        return Score(**{**before, "grades": tuple(map(tuple, before["grades"]))})
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


def chat_eval(cfg: Config, compute: Compute) -> dict[str, Score]:
    """Evaluate the tasks one after another, and add their figures to the report."""
    if cfg.num_samples > 1 and not cfg.temperature:
        raise UserError(
            "--num_samples above 1 needs --temperature above 0, such as --temperature=1: else all samples are equal",
            2,
        )
    usual = settings(Config(), compute.dtype)
    if cfg.dtype != "auto":
        compute = replace(compute, dtype=DTYPES[cfg.dtype], dtype_reason="--dtype")
    cfg = replace(cfg, graphs=graphs.for_replies(cfg.graphs, compute) is not None)
    sampling_for(None, cfg, None)  # refuses bad flags before the model is loaded
    loaded = load_model(cfg.source, cfg.model_tag, cfg.step, compute)
    compute.operations.serve(loaded.model)
    log(f"model: stage {loaded.stage}, tag {loaded.tag}, step {loaded.step}")
    use_task_data(cfg.task_data)
    corpus = loaded.meta["config"]["corpus"]
    tasks, broken = choose_tasks(cfg.task_name, corpus, cfg.unsafe_exec, compute, cfg.shots)
    how = settings(cfg, compute.dtype)
    there = kept(loaded, how, usual)["tasks"] if cfg.once else {}
    if there:
        log(
            f"in the report already: {', '.join(task.name for task in tasks if task.name in there)}"
        )
    scores: dict[str, Score] = {}
    found: dict[str, Any] = {}
    for task in [task for task in tasks if task.name not in there]:
        start, listener = time.monotonic(), Listener(task, cfg.show)
        try:
            score = measure(
                cfg, task, loaded, sampling_for(task, cfg, corpus), how, listener, compute
            )
        except UserError as why:
            if len(tasks) == 1:
                raise
            warn(f"{task.name} is left out: {why}")
            broken.append(task.name)
            continue
        if score is not None:
            scores[task.name] = score
            log(str(score))
            found[task.name] = figures(task, score, time.monotonic() - start, listener.samples)
    if compute.main and (found or there):
        keep(loaded, how, usual, found)
    if broken:
        raise UserError(
            f"{len(broken)} of the tasks could not be evaluated: {', '.join(broken)}. The warnings above say why; the "
            "other tasks are done, and the same command skips them"
        )
    return scores


if __name__ == "__main__":
    run(with_compute(chat_eval), Config, __doc__)
