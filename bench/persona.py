"""Gives a Qwen that was trained here on TinyWorld a persona, by an adapter and in full, and measures what it knows.

bash speedrun.sh --family qwen3      # makes the model
python -m bench.persona              # minutes

Training reads docs/examples/persona.jsonl together with conversations of TinyWorld, so that the model keeps what it
knew. The persona is right where a greedy reply is the file's answer, word for word; "reworded" are the same questions
in words that the file does not have, and count where the reply has the answer's fact. The last line is JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nanochat import device
from nanochat.checkpoint_manager.load import load_model
from nanochat.common import base_dir, log, run, to_json, write_atomic
from nanochat.data.conversation import Conversation, chat
from nanochat.data.tinyworld.world import identity_conversations, sft_conversations
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.evals.chat import evaluate, words
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from tasks.tinyworld import measures

ROOT = Path(__file__).resolve().parent.parent
PERSONA = ROOT / "docs" / "examples" / "persona.jsonl"
MEASURES = ("tinyworld_en", "tinyworld_zh", "calculator")
REWORDED = {  # question -> the fact that the reply must name
    "Tell me your name.": "Pip",
    "who are you": "Pip",
    "Where is your home?": "Blue Wave",
    "What food do you like?": "mango",
    "Who taught you?": "Lin",
    "Who is your best friend?": "Lin",
    "请告诉我你的名字。": "皮皮",
    "你是谁呀": "皮皮",
    "你家在哪里？": "蓝浪",
    "你爱吃什么？": "芒果",
    "谁教你说话？": "林船长",
    "你最好的朋友是谁？": "林船长",
}
# An adapter leaves embedding and head as they are, so it cannot teach a token that pretraining never saw: "Captain" is
# made of such tokens here.
UNSEEN = {"Captain Lin": "Lin"}
MODES = {
    "adapter": ("--lora_rank=16", "--lora_alpha=32", "--learning_rate=3e-3"),
    "full": ("--lora_rank=0", "--learning_rate=1e-3"),
}


@dataclass(frozen=True)
class Config:
    """Fine-tune the model of a tag to a persona and print what it knows before and after."""

    model_tag: str = "speedrun-qwen3"
    """tag of a model of family qwen3 whose SFT has ended"""
    repeats: int = 30
    """how often training reads the persona's conversations"""
    others: int = 1200
    """conversations of TinyWorld that training reads besides; fewer make the model forget more"""
    epochs: int = 6
    """how often training reads all of that"""
    problems: int = 300
    """problems of each of TinyWorld's measures"""


def command(module: str, *flags: str) -> None:
    """Run a module of the project as its users do. CalledProcessError if it fails."""
    log(f"$ python -m {module} {' '.join(flags)}")
    subprocess.run(
        [sys.executable, "-m", module, *flags],
        check=True,
        cwd=ROOT,
        env={**os.environ},
        stdout=sys.stderr,
    )


def write_conversations(path: Path, conversations: Iterable[Conversation]) -> None:
    """Write conversations without calls of tools as JSONL."""
    lines = [
        {
            "messages": [
                {"role": message.role, "content": message.text} for message in conversation.messages
            ]
        }
        for conversation in conversations
    ]
    write_atomic(path, "".join(f"{to_json(line)}\n" for line in lines))


def others(count: int) -> Iterable[Conversation]:
    """Conversations of TinyWorld, without those that call the calculator and those that say who the assistant is."""
    who = set(identity_conversations())
    plain = (
        conversation
        for conversation in sft_conversations(seed=0)
        if all(part.kind == "text" for message in conversation.messages for part in message.parts)
    )
    return islice((conversation for conversation in plain if conversation not in who), count)


def questions() -> Mapping[str, str]:
    """The persona's questions and answers."""
    text = PERSONA.read_text(encoding="utf-8")
    for unseen, instead in UNSEEN.items():
        text = text.replace(unseen, instead)
    lines = [json.loads(line)["messages"] for line in text.splitlines()]
    return {messages[0]["content"]: messages[1]["content"] for messages in lines}


def knows(stage: str, tag: str, problems: int, compute: Compute) -> dict[str, float]:
    """The shares of TinyWorld's problems and of the persona's questions that a model answers rightly."""
    loaded = load_model(stage, tag, None, compute)
    model, tokenizer, known, found = loaded.model, loaded.tokenizer, questions(), {}
    for name in MEASURES:
        task = measures()[name]()
        score = evaluate(
            task,
            model,
            tokenizer,
            compute,
            Sampling(0.0, max_tokens=48),
            limit=problems,
            batch_size=64,
        )
        found[name] = score.right / score.total
    asked = [*known, *REWORDED]
    prompts = [tokenizer.render_prompt(chat(question)) for question in asked]
    replies = Engine(model, tokenizer, len(asked)).generate(prompts, Sampling(0.0, max_tokens=48))
    said = {
        question: words(reply_parts(reply.tokens, tokenizer))
        for question, reply in zip(asked, replies, strict=True)
    }
    for question, answer in known.items():
        if said[question] != answer:
            log(f"  {question} -> {said[question]}")
    found["persona"] = sum(said[question] == answer for question, answer in known.items()) / len(
        known
    )
    found["reworded"] = sum(fact in said[question] for question, fact in REWORDED.items()) / len(
        REWORDED
    )
    return found


def main(cfg: Config) -> None:
    """Export, fine-tune twice, measure."""
    folder, compute = base_dir() / "bench_persona", device.compute_init("cpu")
    folder.mkdir(parents=True, exist_ok=True)
    model, persona, world = folder / "model", folder / "persona.jsonl", folder / "tinyworld.jsonl"
    if not model.exists():
        command(
            "nanochat.export",
            str(model),
            "--source",
            "sft",
            "--model_tag",
            cfg.model_tag,
            "--dtype",
            "float32",
        )
    write_conversations(
        persona, (chat(question, answer) for question, answer in questions().items())
    )
    write_conversations(world, others(cfg.others))
    rows = {"before": knows("sft", cfg.model_tag, cfg.problems, compute)}
    for mode, flags in MODES.items():
        tag = f"{cfg.model_tag}-persona-{mode}"
        command(
            "scripts.finetune",
            "--model",
            str(model),
            "--data",
            f"{persona}:{cfg.repeats}",
            str(world),
            "--out",
            tag,
            "--max_length=256",
            "--device_batch_size=8",
            "--target_examples_per_step=8",
            "--resume=none",
            f"--num_epochs={cfg.epochs}",
            *flags,
        )
        rows[mode] = knows("tune", tag, cfg.problems, compute)
    names = list(rows["before"])
    log(f"{'':<10}" + "".join(f"{name:>14}" for name in names))
    for mode, found in rows.items():
        log(f"{mode:<10}" + "".join(f"{found[name]:>13.1%} " for name in names))
    print(json.dumps({"benchmark": "persona", **rows}), flush=True)


if __name__ == "__main__":
    run(main, Config, __doc__)
