"""Measures what scripts.finetune teaches a published model with its default flags, and what is forgotten.

python -m bench.finetune.learned --model ./smol                   # each kind of data, an adapter, one seed
python -m bench.finetune.learned --model ./smol --kinds villages --rank 0 --seeds 3
python -m bench.finetune.learned --model ./smol --loss dpo

How: 300 conversations about invented things are learned, and 96 questions in other wordings asked
afterwards. The perplexity of two texts that no run trains on and 200 sums show what is forgotten.
The runs of a seed share a base folder, where the model's own words are written once. Typed again
after a stop, the command resumes.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench import tables
from bench.finetune import facts
from bench.processes import ROOT, check_at_least, environment
from nanochat.checkpoint_manager.load import Loaded, load_model, load_published
from nanochat.checkpoint_manager.locate import trained
from nanochat.common import UserError, base_dir, log, read_json, write_json
from nanochat.data.command_line import run
from nanochat.data.conversation import Conversation, user
from nanochat.device import Compute, compute_init
from nanochat.evals.chat import evaluate
from nanochat.generate.sampling import Sampling
from nanochat.runtime.trackers.jsonl import read_metrics
from nanochat.train.forgetting import GeneralText, read_passages

Loss = Literal["answers", "dpo"]
GREEDY = Sampling(temperature=0.0, max_tokens=128)  # the base explains a sum before it says it


@dataclass(frozen=True)
class Config:
    """Fine-tune with the default flags, print what was learned and forgotten, and one JSON object on the last line."""

    model: Path
    """folder of the published model"""
    kinds: tuple[Literal["people", "machines", "villages"], ...] = (
        "people",
        "machines",
        "villages",
    )
    """data sets to learn"""
    rank: int | None = None
    """rank of the adapter; 0 trains every parameter; default: as scripts.finetune"""
    loss: Loss = "answers"
    """objective of training"""
    seeds: int = 1
    """runs of each data set; every run draws other things and another order of the data"""
    other_text: Path = ROOT / "docs" / "devices.md"
    """text file on which the perplexity is measured beside the package's general text"""
    flags: str = ""
    """more flags of scripts.finetune, such as --flags="--num_epochs 4" """


class Questions:
    """A task of questions; a reply is right if it contains the words of the right answer."""

    kind: Literal["choice", "generative"] = "generative"

    def __init__(self, name: str, problems: Sequence[tuple[str, str]]):
        self.name = name
        self.problems = problems

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, i: int) -> Conversation:
        return Conversation((user(self.problems[i][0]),))

    def letters(self, i: int) -> tuple[str, ...]:
        """Return (): the replies are written."""
        return ()

    def grade(self, i: int, reply: str) -> float:
        """Return 1 if the reply holds the answer as words of its own, else 0."""
        answer = re.escape(self.problems[i][1])
        return float(re.search(rf"\b{answer}\b", reply, re.IGNORECASE) is not None)


@dataclass(frozen=True)
class Measured:
    """What a model knows, and how well it predicts texts that no run trains on."""

    right: float  # of facts.QUESTIONS
    sums: float  # of facts.SUMS
    general: float  # perplexity of the package's general text
    other: float  # perplexity of Config.other_text


@dataclass(frozen=True)
class Learned:
    """One run: the model before and after it, and what training took."""

    kind: str
    seed: int
    before: Measured
    after: Measured
    steps: int
    cpu_seconds: float
    peak_gb: float
    margin: float | None  # at the last validation of DPO


def measure(
    loaded: Loaded,
    questions: Sequence[tuple[str, str]],
    other_text: Path,
    compute: Compute,
) -> Measured:
    """Ask a model the questions and the sums, and measure its perplexity on both texts."""

    def right(name: str, problems: Sequence[tuple[str, str]]) -> float:
        task = Questions(name, problems)
        return evaluate(task, loaded.model, loaded.tokenizer, compute, GREEDY).right

    def perplexity(file: Path | None) -> float:
        text = GeneralText(read_passages(file), loaded.model, loaded.tokenizer, compute)
        return text.perplexity(4)

    return Measured(
        right("questions", questions),
        right("sums", facts.sums()),
        perplexity(None),
        perplexity(other_text),
    )


def tag_of(cfg: Config, kind: str) -> str:
    """Return the tag of a run, which names its data and its flags."""
    settings = [kind, cfg.loss]
    if cfg.rank is not None:
        settings.append(f"rank{cfg.rank}")
    return "-".join(settings + re.findall(r"[\w.]+", cfg.flags))


def train(cfg: Config, kind: str, seed: int, folder: Path) -> tuple[float, float]:
    """Fine-tune in a process of its own; returns its CPU seconds and its peak memory in GB.

    A run that was stopped is resumed, and the CPU seconds of all its processes count. Raises
    UserError if it is stopped again, or fails.
    """
    tag = tag_of(cfg, kind)
    known = facts.facts(kind, seed)
    records = facts.preferences(known) if cfg.loss == "dpo" else facts.conversations(known)
    data = folder / f"{tag}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    flags = [f"--model={cfg.model.resolve()}", f"--data={data}", f"--out={tag}", f"--seed={seed}"]
    if cfg.loss == "dpo":
        flags.append("--loss=dpo")
    if cfg.rank is not None:
        flags.append(f"--lora_rank={cfg.rank}")
    command = [sys.executable, "-m", "scripts.finetune", *flags, *shlex.split(cfg.flags)]
    output_path = folder / f"{tag}.log"
    log(f"{kind}, seed {seed}: {' '.join(command[1:])}; its output goes to {output_path}")
    with open(output_path, "a", encoding="utf-8") as output:
        variables = environment(NANOCHAT_BASE_DIR=str(folder))
        process = subprocess.Popen(command, env=variables, cwd=ROOT, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    usage_path = folder / f"{tag}.usage.json"
    earlier = read_json(usage_path) if usage_path.exists() else {"cpu_seconds": 0.0, "peak_gb": 0.0}
    seconds = earlier["cpu_seconds"] + usage.ru_utime + usage.ru_stime
    peak_gb = max(earlier["peak_gb"], usage.ru_maxrss / 2**20)
    write_json(usage_path, {"cpu_seconds": seconds, "peak_gb": peak_gb})
    if process.returncode:
        raise UserError(
            f"scripts.finetune ended with code {process.returncode}; {output_path} says why. "
            "Type the same command to resume"
        )
    with base_folder(folder):
        (model,) = trained("tune", tag)
    if model.unfinished:
        raise UserError(
            f"scripts.finetune was stopped at step {model.step} of {model.steps}. Type the same "
            "command to resume"
        )
    return seconds, peak_gb


@contextlib.contextmanager
def base_folder(folder: Path) -> Iterator[None]:
    """Let `folder` be the base folder in the context, so that its run is found there."""
    before = os.environ.get("NANOCHAT_BASE_DIR")
    os.environ["NANOCHAT_BASE_DIR"] = str(folder)
    try:
        yield
    finally:
        del os.environ["NANOCHAT_BASE_DIR"]
        if before is not None:
            os.environ["NANOCHAT_BASE_DIR"] = before


def learn(cfg: Config, kind: str, seed: int, compute: Compute) -> Learned:
    """Measure one run, or return what was measured before."""
    tag = tag_of(cfg, kind)
    folder = base_dir() / "learned" / cfg.model.resolve().name / f"seed-{seed}"
    text = cfg.other_text.stem  # in the names of files, so that no figure stands for another text
    result = folder / f"{tag}-{text}.json"
    if result.exists():
        saved: dict[str, Any] = read_json(result)
        saved["before"] = Measured(**saved["before"])
        saved["after"] = Measured(**saved["after"])
        return Learned(**saved)
    folder.mkdir(parents=True, exist_ok=True)
    questions = facts.held_out(facts.facts(kind, seed), seed)
    # The same for adapters, all parameters and DPO.
    before_path = folder / f"{kind}-before-{text}.json"
    if before_path.exists():
        before = Measured(**read_json(before_path))
    else:
        published = load_published(cfg.model, None, compute)
        before = measure(published, questions, cfg.other_text, compute)
        write_json(before_path, asdict(before))
    seconds, peak_gb = train(cfg, kind, seed, folder)
    with base_folder(folder):
        loaded = load_model("tune", tag, None, compute)
        metrics = read_metrics(folder / "tuned_checkpoints" / tag)
    after = measure(loaded, questions, cfg.other_text, compute)
    margins = [line["val_margin"] for line in metrics if "val_margin" in line]
    learned = Learned(
        kind, seed, before, after, loaded.step, seconds, peak_gb, margins[-1] if margins else None
    )
    write_json(result, asdict(learned))
    return learned


def row(learned: Learned) -> list[str]:
    """Return a run's row of the table."""
    before, after = learned.before, learned.after
    return [
        f"{learned.kind}, seed {learned.seed}",
        f"{before.right:.0f} -> {after.right:.0f}",
        f"{before.sums:.0f} -> {after.sums:.0f}",
        f"{before.general:.2f}, {after.general / before.general:.3f}x",
        f"{before.other:.2f}, {after.other / before.other:.3f}x",
        "" if learned.margin is None else f"{learned.margin:.2f}",
        f"{learned.steps}",
        f"{learned.cpu_seconds:.0f}",
        f"{learned.peak_gb:.2f}",
    ]


def main(cfg: Config) -> None:
    """Run each data set with each seed, and print the table."""
    check_at_least(1, seeds=cfg.seeds)
    compute = compute_init("cpu")
    runs = [
        learn(cfg, kind, seed, compute) for kind in cfg.kinds for seed in range(1, cfg.seeds + 1)
    ]
    titles = (
        "data",
        f"right of {facts.QUESTIONS}",
        f"sums of {facts.SUMS}",
        "general text",
        cfg.other_text.name,
        "margin",
        "steps",
        "CPU s",
        "peak GB",
    )
    tables.show(titles, map(row, runs))
    tables.finish("finetune.learned", {"runs": [asdict(learned) for learned in runs]})


if __name__ == "__main__":
    run(main, Config, __doc__)
