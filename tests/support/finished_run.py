"""Sections of a run through all stages, with figures that a test can compute."""

import json
from pathlib import Path
from typing import Any

from nanochat.common import write_json
from nanochat.report.sections import training_section, write_section
from nanochat.runtime.cost import stages_file

COSTS = {
    "base_train": {"minutes": 6.0, "cpu_minutes": 11.5, "memory_gb": 1.25, "runs": 2},
    "sft_eval": {"minutes": 1.5, "cpu_minutes": 2.5, "memory_gb": 0.75, "runs": 1},
}


def line(step: int, **more: float | None) -> str:
    figures = {"step": step, "loss": 4.0 - step / 10, "smooth_loss": 4.0 - step / 20, "mfu": 10.0,
               "tokens_per_second": 1000.0 + step, "total_seconds": 6.0 * step, "skipped": step == 2}  # fmt: skip
    return json.dumps(figures | more) + "\n"


def trained(base: Path, stage: str, *lines: str, tag: str = "d2") -> None:
    folder = base / stage
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(lines))
    where = {"device": "a CPU", "dtype": "float32", "parameters": 1234}
    training_section(stage, tag, folder, {"depth": 2, "seed": 42, "note": "a|b"}, where)


def score(accuracy: float, total: int = 20, **more: Any) -> dict[str, Any]:
    return {"accuracy": accuracy, "right": accuracy * total, "total": total, "low": accuracy - 0.1,
            "high": accuracy + 0.1, "baseline": 0.0, **more}  # fmt: skip


def a_run(base: Path) -> None:
    """Sections of every stage."""
    trained(base, "base", line(1), line(2), line(3, val_bpb=1.5), line(4, val_bpb=1.25))
    trained(base, "mid", line(1), line(2, val_bpb=1.125))
    trained(base, "sft", line(1), line(2, val_bpb=0.875))
    rl = [json.dumps({"step": 0, "accuracy": 0.5}) + "\n", line(1, reward=0.25), line(2, reward=0.5, accuracy=0.75)]
    trained(base, "rl", *rl)
    sample = {"question": "法国的首都是哪里？", "reply": "巴黎。", "grade": 1.0}
    wrong = {"question": "What is | 2?", "reply": "3\n4", "grade": 0.0}
    for stage, accuracy in (("mid", 0.5), ("sft", 0.96875), ("rl", 0.9375)):
        groups = {"capital": {"right": 9.0, "total": 10}, "colour": {"right": 10.0, "total": 10}}
        tasks = {"tinyworld_en": score(accuracy, samples=[wrong]), "calculator": score(1.0),
                 "tinyworld_zh": score(accuracy - 0.25, samples=[sample], groups=groups),
                 "mental": score(accuracy / 2)}  # fmt: skip
        write_section(f"{stage}_eval", {"tag": "d2", "step": 2, "tasks": tasks, "chat_core": None})
    write_section("base_loss", {"tag": "d2", "train": {"bits_per_byte": 1.0}, "samples": {"日本的首都是": "东京"}})
    write_section("tok_eval", {"rows": [{"text": "中文", "ratio": 2.5}, {"text": "english", "more": 1}]})
    write_section("base_eval", {"core": {"core": 0.0625}})
    write_json(stages_file(), COSTS)
