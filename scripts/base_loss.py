"""Bits per byte of a base model on both splits of its corpus, and what it says after a few beginnings.

python -m scripts.base_loss
torchrun --standalone --nproc_per_node=8 -m scripts.base_loss -- --device_batch_size=32 --split_tokens=10485760
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from nanochat import device, report
from nanochat.checkpoint_manager.load import Loaded, load_model
from nanochat.common import log, run
from nanochat.data.mixing import resolve_data
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.evals import loss as loss_eval
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.runtime import parallel

PROMPTS = (
    "The capital of Japan is",
    "The opposite of cold is",
    "A week has seven days:",
    "If today is Monday, then tomorrow is",
    "Birds can fly because they have",
    "12 plus 30 is",
    "日本的首都是",
    "冷的反义词是",
    "一年有四个季节：",
    "鱼生活在",
)
SPLITS: tuple[Literal["train", "val"], ...] = ("train", "val")


@dataclass(frozen=True)
class Config:
    """Flags of the evaluation of a base model's loss."""

    device_type: str = ""
    """npu, cuda or cpu; empty = the first that is usable"""
    data: str | None = None
    """corpus by name, a folder of one's own, or a mixture such as web:0.7,books:0.3; default: what the model was
    trained on"""
    model_tag: str | None = None
    """folder of the checkpoints, such as d20; default: the newest"""
    model_step: int | None = None
    """step of the checkpoint; default: the newest"""
    device_batch_size: int | Literal["auto"] = "auto"
    """rows of a pass on one device"""
    split_tokens: int | Literal["auto"] = "auto"
    """tokens of each split to measure on, at most all: 10 M, on a CPU 262,144"""
    sample_tokens: int = 16
    """tokens of each sample; 0 = no samples"""
    once: bool = False
    """do nothing if the report already has the figures of this checkpoint"""


def sample(loaded: Loaded, max_tokens: int) -> dict[str, str]:
    """What a base model says after each of PROMPTS, taking the likeliest token each time."""
    tokenizer = loaded.tokenizer
    engine = Engine(loaded.model, tokenizer)
    prompts = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    completions = engine.generate(prompts, Sampling(temperature=0.0, max_tokens=max_tokens))
    said = ("".join(part.text for part in reply_parts(one.tokens, tokenizer)) for one in completions)
    return dict(zip(PROMPTS, said, strict=True))


def evaluate(cfg: Config, compute: Compute) -> dict[str, Any]:
    """Measure, sample, and leave a section for the report; the section."""
    loaded = load_model("base", cfg.model_tag, cfg.model_step, compute)
    data = resolve_data(cfg.data or loaded.meta["config"]["corpus"])
    log(f"base model {loaded.tag}, step {loaded.step:,}, on {data.name}")
    model = loaded.meta["files"]["model.safetensors"]["sha256"][:16]
    section: dict[str, Any] = {"tag": loaded.tag, "step": loaded.step, "model": model, "corpus": data.name}
    before = report.sections().get("base_loss", {})
    if cfg.once and parallel.agree(int(before.items() >= section.items()), compute):
        log("in the report already")
        return before
    for split in SPLITS:
        loss = loss_eval.evaluate_split(
            loaded.model, loaded.tokenizer, data, split, cfg.split_tokens, cfg.device_batch_size, compute
        )
        log(f"{split} bpb: {loss.bits_per_byte:.4f} ({loss.tokens:,} tokens, {loss.bytes:,} bytes)")
        section[split] = asdict(loss)
    if compute.main:
        section["samples"] = sample(loaded, cfg.sample_tokens) if cfg.sample_tokens else {}
        for prompt, said in section["samples"].items():
            log(f"{prompt}|{said}")
        report.write_section("base_loss", section)
    return section


if __name__ == "__main__":
    run(device.with_compute(evaluate), Config, __doc__)
