"""Evaluate a model by CORE, multiple choice and bits per byte, if their data is here.

python -m scripts.base_eval
python -m scripts.base_eval --max_per_task=100                 # a quick look
python -m scripts.base_eval --download                         # downloads the bundle first, 162 MB
python -m scripts.base_eval --tasks "ARC-Easy|MMLU|C-Eval|CMMLU" --task_data DIR
python -m scripts.base_eval --model ./Qwen3-0.6B --tasks "ARC-Easy|MMLU"
torchrun --standalone --nproc_per_node=8 -m scripts.base_eval -- --eval_bundle=DIR
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import arg

from nanochat import device
from nanochat.checkpoint_manager.load import Loaded
from nanochat.common import UserError, base_dir, log, sha256_of, tr, warn, write_atomic
from nanochat.data.command_line import run
from nanochat.data.mixing import Data
from nanochat.device import Compute
from nanochat.evals import core as core_eval
from nanochat.evals import loss as loss_eval
from nanochat.evals.choices import ChoiceScore, choice_facts, evaluate_choices
from nanochat.evals.core import Core
from nanochat.evals.measured import MeasuredFlags, Stage, texts_for
from nanochat.evals.records import Records, records_dir, unfinished
from nanochat.report.sections import write_section
from nanochat.runtime import parallel
from tasks.catalogue import choice_tasks, use_task_data


@dataclass(frozen=True)
class Config(MeasuredFlags):
    """Evaluate a model, by default a base model: CORE, multiple choice and bits per byte."""

    source: Annotated[Stage | None, arg(aliases=["-i"])] = None
    """Stage of the model. Default: base."""
    device_type: str = ""
    """Device to use: npu, cuda, mps or cpu. Default: the first usable one, except mps."""
    data: str | None = None
    """Corpus to measure bits per byte on: a name, a folder of your own,
    or a mixture such as web:0.7,books:0.3.
    Default: the corpus that the model was trained on. A published model needs it."""
    eval_bundle: str | None = None
    """Folder of CORE's tasks. Default: eval_bundle in the base folder.
    Set it if you copied the bundle by hand."""
    download: bool = False
    """Download the bundle (162 MB) into the base folder first, unless it is there already."""
    download_only: bool = False
    """Download the bundle, unless it is there already, and evaluate nothing.
    Pretraining can then measure CORE as it trains."""
    tasks: str | None = None
    """Multiple choice to evaluate, with | between the names:
    ARC-Easy, ARC-Challenge, MMLU, MMLU-Pro, C-Eval, CMMLU.
    Default: none."""
    shots: int | None = None
    """Examples to show before each question of --tasks; default:
    five, as the authors show, and none for ARC."""
    task_data: str | None = None
    """Folder with copies of the data sets of --tasks, for a machine without a network.
    Default: NANOCHAT_TASK_DIR."""
    again: bool = False
    """Evaluate tasks again whose answers, of this checkpoint, these flags and this data,
    are kept already."""
    max_per_task: int = -1
    """Most problems to evaluate of each task; -1 means all. Set 100 for a quick look."""
    device_batch_size: int | Literal["auto"] = "auto"
    """Rows per pass on one device. auto: 32; on a CPU,
    4 for CORE and 4,096 tokens for bits per byte.
    Lower it if the device runs out of memory."""
    split_tokens: int | Literal["auto"] = "auto"
    """Tokens to measure bits per byte on, at most the whole split. auto: 10 M, on a CPU 262,144."""


def table(core: Core, mean: float) -> str:
    """Return CORE's scores as CSV text in the published format: Task, Accuracy, Centered."""
    lines = [f"{'Task':<35}, {'Accuracy':<10}, {'Centered':<10}"]
    for score in core.tasks:
        lines.append(f"{score.label:<35}, {score.accuracy:<10.6f}, {score.centered:<10.6f}")
    lines.append(f"{'CORE':<35}, {'':<10}, {mean:<10.6f}")
    return "\n".join(lines) + "\n"


def limits(cfg: Config, loaded: Loaded, compute: Compute) -> tuple[int | None, int]:
    """Return the limits on problems per task (None for no limit) and on tokens per pass."""
    problems = cfg.max_per_task if cfg.max_per_task > 0 else None
    rows = cfg.device_batch_size
    if rows == "auto":
        rows = compute.platform.evaluation_rows
    return problems, rows * loaded.row_tokens


def answers(
    name: str,
    facts: Mapping[str, Any],
    cfg: Config,
    loaded: Loaded,
    compute: Compute,
) -> Records:
    """Return the Records of a task, which keep its answers in a file.

    With --again, the file's earlier answers are deleted first.
    """
    about = {
        "model": loaded.weights,
        "settings": {"limit": cfg.max_per_task, "dtype": str(compute.dtype)},
        **facts,
    }
    records = Records(records_dir(loaded.stage, loaded.tag, loaded.step), name, about, compute)
    if cfg.again and compute.main:
        records.path.unlink(missing_ok=True)
    device.barrier(compute)
    return records


def evaluate_tasks(
    cfg: Config,
    loaded: Loaded,
    compute: Compute,
) -> tuple[dict[str, ChoiceScore], list[str]]:
    """Evaluate the tasks of --tasks; return their scores by name, and the names of failed tasks.

    Raises UserError (exit code 2) if a name is unknown.
    """
    makers = choice_tasks(cfg.shots)
    names = [name.strip() for name in (cfg.tasks or "").split("|") if name.strip()]
    if any(name not in makers for name in names):
        raise UserError(
            tr(
                "--tasks takes {makers}, with | between several; got {tasks!r}",
                makers=", ".join(makers),
                tasks=cfg.tasks,
            ),
            2,
        )
    use_task_data(cfg.task_data)
    limit, tokens = limits(cfg, loaded, compute)
    scores: dict[str, ChoiceScore] = {}
    broken: list[str] = []
    for name in names:
        try:
            with parallel.together(name, compute):
                task = makers[name]()
                facts = choice_facts(task, limit)
            records = answers(name, facts, cfg, loaded, compute)
            saved_score = records.saved_score()
            on_all_ranks = parallel.least(int(saved_score is not None), compute)
            if on_all_ranks and saved_score is not None:
                log(
                    tr(
                        "{name}: done before, as {path} says; --again evaluates it again",
                        name=name,
                        path=records.path,
                    )
                )
                scores[name] = ChoiceScore(**saved_score)
            else:
                scores[name] = evaluate_choices(
                    task, loaded.model, loaded.tokenizer, compute, tokens, limit, records
                )
            log(str(scores[name]))
        except UserError as why:
            warn(tr("{name} is left out: {why}", name=name, why=why))
            broken.append(name)
    return scores, broken


def evaluate_core(
    cfg: Config, bundle: Path | None, loaded: Loaded, compute: Compute
) -> Core | None:
    """Measure CORE and return it, or None if there is no bundle.

    If no task is broken, rank 0 also writes the scores to <base>/base_eval/<tag>_<step>.csv; the
    name begins with the stage of the model, unless that is base.
    """
    if bundle is None:
        log(
            tr(
                "CORE is left out: there is no eval bundle in {base_dir}. Download it with "
                "--download, or name your own copy with --eval_bundle DIR",
                base_dir=base_dir() / "eval_bundle",
            )
        )
        return None
    limit, tokens = limits(cfg, loaded, compute)

    def records(task: core_eval.IclTask) -> Records:
        facts = {
            "data": sha256_of(task.path) if task.path.is_file() else "",
            "shots": task.shots,
            "kind": task.kind,
            "delimiter": task.delimiter,
            "baseline": task.baseline,
        }
        return answers(f"CORE-{task.label}", facts, cfg, loaded, compute)

    core = core_eval.evaluate_core(
        loaded.model, loaded.tokenizer, bundle, compute, limit, tokens, records
    )
    if core.core is not None and compute.main:
        of_stage = "" if loaded.stage == "base" else f"{loaded.stage}-"
        path = base_dir() / "base_eval" / f"{of_stage}{loaded.tag}_{loaded.step:06d}.csv"
        write_atomic(path, table(core, core.core))
        log(f"CORE {core.core:.4f} ({path})")
    return core


def find_texts(cfg: Config, loaded: Loaded) -> Data | None:
    """Return the corpus to measure bits per byte on.

    Without --data, returns None if the corpus that the model was trained on is not here.
    """
    try:
        return texts_for(cfg.data, loaded)
    except UserError as missing:
        if cfg.data is not None:
            raise
        log(tr("bits per byte are left out: {missing}", missing=missing))
        return None


def evaluate_bits(
    cfg: Config,
    loaded: Loaded,
    data: Data,
    compute: Compute,
) -> loss_eval.Loss:
    """Measure the validation loss, log its bits per byte, and return the loss."""
    loss = loss_eval.evaluate_split(
        loaded.model,
        loaded.tokenizer,
        data,
        "val",
        cfg.split_tokens,
        cfg.device_batch_size,
        compute,
        loaded.row_tokens,
    )
    log(
        tr(
            "val bpb: {bits_per_byte:.4f} ({name}, {tokens:,} tokens, {bytes:,} bytes)",
            bits_per_byte=loss.bits_per_byte,
            name=data.name,
            tokens=loss.tokens,
            bytes=loss.bytes,
        )
    )
    return loss


def evaluate(cfg: Config, compute: Compute) -> dict[str, Any]:
    """Run the evaluations whose data is here, write their section of the report, and return it.

    Raises UserError if a size is less than 1 or nothing was evaluated (exit code 2), or at the end
    if a task failed.
    """
    loss_eval.check_sizes(cfg.split_tokens, cfg.device_batch_size)
    if cfg.max_per_task < 1 and cfg.max_per_task != -1:
        raise UserError(
            tr(
                "max_per_task must be at least 1, or -1 for all problems, got {problems}",
                problems=cfg.max_per_task,
            ),
            exit_code=2,
        )
    if cfg.download or cfg.download_only:
        if compute.main and core_eval.find_bundle(cfg.eval_bundle) is None:
            core_eval.download_bundle()
        device.barrier(compute)
    if cfg.download_only:
        log(tr("CORE's tasks: {folder}", folder=core_eval.find_bundle(cfg.eval_bundle)))
        return {}
    loaded = cfg.load(compute, "base")
    compute.operations.serve(loaded.model)
    log(
        tr(
            "{stage} model {tag}, step {step:,}",
            stage=loaded.stage,
            tag=loaded.tag,
            step=loaded.step,
        )
    )
    data = find_texts(cfg, loaded)  # refused before hours of CORE, as is a folder without a bundle
    bundle = core_eval.find_bundle(cfg.eval_bundle)
    scores, broken = evaluate_tasks(cfg, loaded, compute)
    core = evaluate_core(cfg, bundle, loaded, compute)
    broken += core.broken if core else ()
    bits = None if data is None else evaluate_bits(cfg, loaded, data, compute)
    if core is None and bits is None and not scores and not broken:
        raise UserError(
            tr(
                "nothing was evaluated: neither an eval bundle nor the corpus is here. The "
                "lines above say how to get them"
            ),
            exit_code=2,
        )
    if scores or core is not None:
        log(
            tr(
                "answers: {folder}",
                folder=records_dir(loaded.stage, loaded.tag, loaded.step),
            )
        )
    section: dict[str, Any] = {
        "tag": loaded.tag,
        "step": loaded.step,
        "settings": {
            "max_per_task": cfg.max_per_task,
            "shots": cfg.shots,
            "split_tokens": cfg.split_tokens,
            "dtype": str(compute.dtype),
        },
        "core": None,
        "val": None,
    }
    if core is not None and core.core is not None:
        section["core"] = {"core": core.core, "tasks": [asdict(task) for task in core.tasks]}
    if bits is not None:
        section["val"] = asdict(bits)
    section["choices"] = {name: asdict(score) for name, score in scores.items()}
    if compute.main:
        # Of other stages, <stage>_eval is the section of chat_eval.
        name = "base_eval" if loaded.stage == "base" else f"{loaded.stage}_core"
        write_section(name, section)
    if broken:
        raise unfinished(broken)
    return section


if __name__ == "__main__":
    run(device.with_compute(evaluate), Config, __doc__)
