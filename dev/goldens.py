"""Records losses and replies of short runs of every stage, to compare two versions of the code.

    python -m dev.goldens record ../before goldens/before    # runs every case with the code in ../before
    python -m dev.goldens record . goldens/after --models goldens/before/models
    python -m dev.goldens compare goldens/before goldens/after

A case is a run of 200 steps of a tiny model on this machine. Goldens are therefore compared between
two trees on one machine, and never between machines. `--only base sft` runs some of the cases; the
cases that they start from must have run before.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STEPS = 200
FIGURES = ("loss", "val_bpb", "val_loss", "grad_norm", "reward", "accuracy", "sampler_gap")
PROMPTS = ("What is 17 + 25?", "法国的首都是哪里？", "Tell me a story about a cat.")

SHAPE = ["--depth=3", "--model_dim=64", "--head_dim=32", "--max_seq_len=128", "--window_pattern=SL"]
BATCH = ["--total_batch_size=1024", "--device_batch_size=4"]
EVERY = [f"--num_iterations={STEPS}", "--eval_every=100", "--other_code", "--hang_seconds=0"]
TRAINED = [*EVERY, "--no_compile"]
COMMANDS = {
    "base": [
        "scripts.base_train",
        "--data=tinyworld",
        *SHAPE,
        *BATCH,
        *TRAINED,
        "--eval_tokens=8192",
        "--offset_layers=1",
        "--bigram_rows=2048",
    ],
    "mid": ["scripts.mid_train", *BATCH, *TRAINED],
    "sft": ["scripts.chat_sft", "--target_examples_per_step=8", *TRAINED],
    "rl": [
        "scripts.chat_rl",
        "--examples_per_step=4",
        "--num_samples=4",
        "--max_new_tokens=16",
        "--eval_examples=20",
        *EVERY,
    ],
    "tune": [
        "scripts.finetune",
        "--replay_every=0",
        "--target_examples_per_step=8",
        "--max_length=128",
        "--learning_rate=1e-3",
        *TRAINED,
    ],
}
FOLDERS = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl", "tune": "tuned"}
PASSED_ON = ("base", "mid", "sft")  # the cases that the next stage starts from
ABOUT_THE_RUN = ("device:", "model:", "other models", "temperature ")  # lines of chat_cli


@dataclass(frozen=True)
class Case:
    """One run to record: its stage, flags, ranks and device."""

    name: str
    stage: str
    flags: tuple[str, ...] = ()
    ranks: int = 1
    chip: str = ""  # the chip of the emulated NPU, or empty for the CPU
    environment: dict[str, str] = field(default_factory=dict)
    parent: str = ""  # the tag of the model that the stage starts from

    @property
    def tag(self) -> str:
        """The tag of the model that the run trains.

        The cases on which the next stage builds share one tag, by which that stage finds the model.
        """
        return "base" if self.name in PASSED_ON else self.name


def cases() -> list[Case]:
    """Return every case, each after the case that it starts from."""
    all_cases: list[Case] = []
    for stage in ("base", "mid", "sft", "rl"):
        all_cases.append(Case(stage, stage, parent="base"))
        all_cases.append(Case(f"{stage}-ranks", stage, ranks=2, parent="base"))
        all_cases.append(Case(f"{stage}-npu", stage, chip="910B3", parent="base"))
    bf16 = {"NANOCHAT_DTYPE": "bfloat16"}
    all_cases += [
        Case("base-plain", "base", ("--kernels=plain",)),
        Case("base-bf16", "base", environment=bf16),
        Case("base-int8", "base", ("--matmul=int8",), environment=bf16),
        Case("base-compiled", "base", ("--compile",)),
        Case(
            "base-qwen3",
            "base",
            ("--family=qwen3", "--window_pattern=SSSL", "--offset_layers=0", "--bigram_rows=0"),
        ),
        Case("mid-plain", "mid", ("--kernels=plain",), parent="base"),
        Case("sft-plain", "sft", ("--kernels=plain",), parent="base"),
        Case("rl-rows", "rl", ("--no_trees",), parent="base"),
    ]
    for family in ("qwen2", "qwen3", "qwen3.5"):
        all_cases.append(Case(f"lora-{family}", "tune", parent=family))
        all_cases.append(Case(f"full-{family}", "tune", ("--lora_rank=0",), parent=family))
    all_cases += [
        Case("lora-qwen3-bf16", "tune", environment=bf16, parent="qwen3"),
        Case("lora-qwen3-ranks", "tune", ranks=2, parent="qwen3"),
        Case("dpo-qwen3", "tune", ("--loss=dpo",), parent="qwen3"),
        Case("lora-qwen3-npu", "tune", chip="910B3", parent="qwen3"),
        Case(
            "dpo-qwen3-npu",
            "tune",
            ("--loss=dpo", "--num_iterations=6"),
            chip="910B3",
            ranks=2,
            parent="qwen3",
        ),
    ]
    return all_cases


class Recorder:
    """Runs cases with the code of one tree, and keeps their figures in a folder."""

    def __init__(self, tree: Path, folder: Path, models: Path | None):
        self.tree = tree.resolve()
        self.folder = folder.resolve()
        self.base = self.folder / "base"
        self.models = (models or self.folder / "models").resolve()
        self.python = str(self.tree / ".venv" / "bin" / "python")
        self.base.mkdir(parents=True, exist_ok=True)

    def run(self, arguments: list[str], environment: dict[str, str] | None = None) -> str:
        """Run Python with these arguments in the tree, and return what it printed.

        Raises SystemExit with the last output if the command fails.
        """
        settings = {
            **os.environ,
            "NANOCHAT_BASE_DIR": str(self.base),
            "NANOCHAT_DEVICE": "cpu",
            "NANOCHAT_DTYPE": "float32",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            **(environment or {}),
        }
        if settings["NANOCHAT_DEVICE"] == "npu":
            del settings["NANOCHAT_DEVICE"]
        ended = subprocess.run(
            [self.python, *arguments],
            cwd=self.tree,
            env=settings,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        if ended.returncode:
            command = " ".join(arguments)
            last_lines = ended.stdout[-3000:]
            raise SystemExit(f"{command} ended with {ended.returncode}:\n{last_lines}")
        return ended.stdout

    def prepare(self) -> None:
        """Make the corpus, its tokenizer and the random published models, unless they exist."""
        if not (self.base / "tokenizer").exists():
            self.run(["-m", "nanochat.dataset", "--data", "tinyworld"])
            self.run(["-m", "scripts.tok_train", "--data", "tinyworld", "--vocab_size", "1024"])
        for family in ("qwen2", "qwen3", "qwen3.5"):
            target = self.models / family
            if not target.exists():
                target.mkdir(parents=True)
                code = (
                    "from pathlib import Path; from tests.support.qwens import write_folder; "
                    f"write_folder(Path({str(target)!r}), {family!r})"
                )
                self.run(["-c", code])
        self._write_conversations()

    def _write_conversations(self) -> None:
        """Write 400 conversations, 200 pairs of answers and 100 problems.

        They are the same on every machine.
        """
        generator = random.Random(7)
        chats, pairs = [], []
        for _ in range(400):
            a, b = generator.randrange(50), generator.randrange(50)
            question = {"role": "user", "content": f"What is {a} + {b}?"}
            right = {"role": "assistant", "content": f"It is {a + b}."}
            wrong = {"role": "assistant", "content": f"It is {a + b + 1}."}
            chats.append({"messages": [question, right]})
            pairs.append({"prompt": [question], "chosen": [right], "rejected": [wrong]})
        sums = [(a, b) for a in range(5) for b in range(5)]
        wordings = ("What is {} + {}?", "Add {} and {}.", "{} + {} = ?", "How much is {} plus {}?")
        problems = [
            {"question": w.format(a, b), "answer": str(a + b)} for w in wordings for a, b in sums
        ]
        for name, records in (("chats", chats), ("pairs", pairs[:200]), ("problems", problems)):
            lines = (json.dumps(record, ensure_ascii=False) for record in records)
            (self.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    def stage_flags(self, case: Case) -> list[str]:
        """Return the flags of a case: those of its stage, its inputs and outputs, and its own."""
        _, *flags = COMMANDS[case.stage]
        if case.stage == "tune":
            data_name = "pairs" if "--loss=dpo" in case.flags else "chats"
            flags.append(f"--model={self.models / case.parent}")
            flags.append(f"--data={self.folder / data_name}.jsonl")
        elif case.stage != "base":
            flags.append(f"--model_tag={case.parent}")
        tag_flag = "model_tag" if case.stage == "base" else "out_tag"
        flags.append(f"--{tag_flag}={case.tag}")
        if case.stage == "rl":
            flags.append(f"--problems={self.folder / 'problems'}.jsonl")
        return [*flags, *case.flags]

    def command(self, case: Case) -> list[str]:
        """Return the arguments with which Python runs a case, on its ranks and its device."""
        module = COMMANDS[case.stage][0]
        arguments = ["-m", module, *self.stage_flags(case)]
        if case.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone"]
            ranks = f"--nproc_per_node={case.ranks}"
            arguments = [*launcher, ranks, "-m", module, "--", *self.stage_flags(case)]
        if case.chip:
            emulator = ["-m", "tests.emulated_npu", "--chip", case.chip]
            arguments = [*emulator, "--devices", str(case.ranks), "--", self.python, *arguments]
        return arguments

    def record(self, case: Case) -> None:
        """Run one case, and write its figures and the replies of its model to NAME.json."""
        checkpoints = self.base / f"{FOLDERS[case.stage]}_checkpoints" / case.tag
        shutil.rmtree(checkpoints, ignore_errors=True)
        environment = dict(case.environment)
        if case.chip:
            environment["NANOCHAT_DEVICE"] = "npu"
        self.run(self.command(case), environment)
        metrics = (checkpoints / "metrics.jsonl").read_text(encoding="utf-8")
        steps = [json.loads(line) for line in metrics.splitlines()]
        figures = [{key: step[key] for key in ("step", *FIGURES) if key in step} for step in steps]
        replies = {} if case.chip or case.ranks > 1 else self.replies(case)
        content = {"figures": figures, "replies": replies}
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (self.folder / f"{case.name}.json").write_text(text, encoding="utf-8")
        print(f"{case.name}: {len(figures)} lines, last loss {figures[-1].get('loss')}", flush=True)

    def replies(self, case: Case) -> dict[str, str]:
        """Return the model's greedy reply to each of the prompts."""
        chat = ["-m", "scripts.chat_cli", "-i", case.stage, "-g", case.tag, "-t", "0", "-m", "24"]
        return {
            prompt: reply_in(self.run([*chat, "-p", prompt], case.environment))
            for prompt in PROMPTS
        }


def reply_in(output: str) -> str:
    """Return the reply and its tool calls in the output of chat_cli.

    Lines about the device, the models and the speed are left out.
    """
    lines = [
        line
        for line in output.splitlines()
        if not line.startswith(ABOUT_THE_RUN) and " tokens/s" not in line
    ]
    return "\n".join(lines)


def compare(before: Path, after: Path) -> int:
    """Print a line for each recorded case, and return how many cases differ."""
    different = 0
    for path in sorted(before.glob("*.json")):
        if not (after / path.name).exists():
            print(f"{path.stem}: not recorded in {after}")
            continue
        problem = difference(read_record(path), read_record(after / path.name))
        different += bool(problem)
        print(f"{path.stem}: {problem or 'identical'}")
    return different


def read_record(path: Path) -> dict[str, Any]:
    """Return the record of a case, with its figures and replies."""
    return json.loads(path.read_text(encoding="utf-8"))


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe what differs between two records, or return "" if nothing does.

    The text names the first step that differs, the largest difference of each figure, and the
    prompts with other replies.
    """
    if len(before["figures"]) != len(after["figures"]):
        return f"{len(before['figures'])} and {len(after['figures'])} lines"
    largest_gaps: dict[str, float] = {}
    differences: list[str] = []
    for a, b in zip(before["figures"], after["figures"], strict=True):
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) == b.get(key):
                continue
            if not largest_gaps:
                differences.append(f"differs from step {a['step']} ({key})")
            gap = abs(a.get(key, math.inf) - b.get(key, math.inf))
            largest_gaps[key] = max(largest_gaps.get(key, 0.0), gap)
    differences += [f"{key} by at most {gap:.2e}" for key, gap in largest_gaps.items()]
    for prompt, reply in before["replies"].items():
        # Records from before 2026-11-27 have every line that chat_cli printed.
        if reply_in(reply) != reply_in(after["replies"].get(prompt, "")):
            differences.append(f"another reply to {prompt!r}")
    return ", ".join(differences)


def main() -> int:
    """Record or compare, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.goldens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the cases with the code of a tree")
    recording.add_argument("tree", type=Path)
    recording.add_argument("folder", type=Path)
    recording.add_argument(
        "--models", type=Path, help="folder of the random published models that another record made"
    )
    recording.add_argument("--only", nargs="*", help="names of cases")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return min(compare(arguments.before, arguments.after), 1)
    recorder = Recorder(arguments.tree, arguments.folder, arguments.models)
    recorder.prepare()
    for case in cases():
        if not arguments.only or case.name in arguments.only:
            recorder.record(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
