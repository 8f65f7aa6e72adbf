"""Measure bits per byte on both splits of the corpus, and by domain, and continue a few prompts.

python -m scripts.base_loss
python -m scripts.base_loss --source=sft     # what fine-tuning has left of pretraining
python -m scripts.base_loss --model ./Qwen3-0.6B --data ~/my-texts
python -m scripts.base_loss -i tune --data ~/my-texts
torchrun --standalone --nproc_per_node=8 -m scripts.base_loss -- --split_tokens=10485760
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from nanochat import device
from nanochat.checkpoint_manager.load import PUBLISHED, Loaded
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import log, tr
from nanochat.data.command_line import run
from nanochat.data.mixing import Data
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.evals import loss as loss_eval
from nanochat.evals.domains import evaluate_domains
from nanochat.evals.loss import Loss
from nanochat.evals.measured import MeasuredFlags, Stage, texts_for
from nanochat.generate.reply import reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.report.sections import read_sections, write_section
from nanochat.runtime import parallel
from nanochat.runtime.samples import Sample, keep_samples

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
class Config(MeasuredFlags):
    """Measure bits per byte of a model, by default a base model; let it continue a few prompts."""

    source: Annotated[Stage | None, arg(aliases=["-i"])] = None
    """Stage of the model. Default: base.
    A later stage is measured on the validation split of the base corpus, to show forgetting."""
    device_type: str = ""
    """Device to use: npu, cuda, mps or cpu. Default: the first usable one, except mps."""
    data: str | None = None
    """Corpus to measure bits per byte on: a name, a folder of your own,
    or a mixture such as web:0.7,books:0.3.
    Default: the corpus that the model was trained on. A published model needs it."""
    device_batch_size: int | Literal["auto"] = "auto"
    """Rows per pass on one device. auto: 32, on a CPU 4,096 tokens.
    Lower it if the device runs out of memory."""
    split_tokens: int | Literal["auto"] = "auto"
    """Tokens of each split to measure on, at most the whole split. auto: 10 M, on a CPU 262,144."""
    sample_tokens: int = 16
    """Tokens to generate after each prompt; 0 skips the samples."""
    domain_tokens: int | Literal["auto"] = "auto"
    """Tokens of the validation split to measure by language and domain; 0 leaves that out.
    auto: 2.6 M, on a CPU 65,536."""
    once: bool = False
    """Do nothing if the report already has the figures of this checkpoint and these flags."""


def sample(loaded: Loaded, max_tokens: int) -> dict[str, str]:
    """Return the model's greedy continuation of each prompt in PROMPTS, by prompt."""
    tokenizer = loaded.tokenizer
    start = [tokenizer.bos] if tokenizer.adds_bos else []
    prompts = [[*start, *tokenizer.encode(prompt)] for prompt in PROMPTS]
    longest = max(map(len, prompts)) + max_tokens
    length = min(longest, loaded.model.config.sequence_len)
    engine = Engine(loaded.model, tokenizer, len(prompts), length)
    completions = engine.generate(prompts, Sampling(temperature=0.0, max_tokens=max_tokens))
    continuations = {}
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        parts = reply_parts(completion.tokens, tokenizer, continues=True)
        continuations[prompt] = "".join(part.text for part in parts)
    return continuations


def domain_losses(
    cfg: Config,
    loaded: Loaded,
    data: Data,
    compute: Compute,
) -> dict[str, Loss]:
    """Measure and log the validation loss of each language and domain; return losses by name."""
    platform = compute.platform
    tokens = cfg.domain_tokens
    if tokens == "auto":
        tokens = platform.split_tokens // 4
    if cfg.device_batch_size != "auto":
        tokens_per_pass = cfg.device_batch_size * loaded.row_tokens
    else:
        tokens_per_pass = platform.pass_tokens or platform.evaluation_rows * loaded.row_tokens
    losses = evaluate_domains(
        loaded.model,
        loaded.tokenizer,
        data,
        tokens,
        tokens_per_pass,
        compute,
        loaded.row_tokens,
    )
    for name, loss in losses.items():
        log(
            tr(
                "val bpb of {name}: {bits_per_byte:.4f} ({tokens:,} tokens, {bytes:,} bytes)",
                name=name,
                bits_per_byte=loss.bits_per_byte,
                tokens=loss.tokens,
                bytes=loss.bytes,
            )
        )
    return losses


def evaluate(cfg: Config, compute: Compute) -> dict[str, Any]:
    """Measure the model, sample from it, and write and return its section of the report.

    Only rank 0 samples and writes. With --once, an existing section of the same checkpoint, corpus
    and settings is returned instead.
    """
    loaded = cfg.load(compute, "base")
    data = texts_for(cfg.data, loaded)
    log(
        tr(
            "{stage} model {tag}, step {step:,}, on {name}",
            stage=loaded.stage,
            tag=loaded.tag,
            step=loaded.step,
            name=data.name,
        )
    )
    section: dict[str, Any] = {
        "tag": loaded.tag,
        "step": loaded.step,
        "model": loaded.weights[:16],
        "corpus": data.name,
        "settings": {
            "split_tokens": cfg.split_tokens,
            "domain_tokens": cfg.domain_tokens,
            "sample_tokens": cfg.sample_tokens,
            "dtype": str(compute.dtype),
        },
    }
    reported = read_sections().get(f"{loaded.stage}_loss", {})
    if cfg.once and parallel.agree(int(reported.items() >= section.items()), compute):
        log(tr("in the report already"))
        return reported
    for split in SPLITS if loaded.stage == "base" else SPLITS[1:]:
        loss = loss_eval.evaluate_split(
            loaded.model,
            loaded.tokenizer,
            data,
            split,
            cfg.split_tokens,
            cfg.device_batch_size,
            compute,
            loaded.row_tokens,
        )
        log(
            tr(
                "{split} bpb: {bits_per_byte:.4f} ({tokens:,} tokens, {bytes:,} bytes)",
                split=split,
                bits_per_byte=loss.bits_per_byte,
                tokens=loss.tokens,
                bytes=loss.bytes,
            )
        )
        section[split] = asdict(loss)
    if cfg.domain_tokens != 0:
        losses = domain_losses(cfg, loaded, data, compute)
        section["domains"] = {name: asdict(loss) for name, loss in losses.items()}
    if compute.main:
        continuations = sample(loaded, cfg.sample_tokens) if cfg.sample_tokens else {}
        samples = []
        for prompt, continuation in continuations.items():
            log(f"{prompt}|{continuation}")
            samples.append(Sample(loaded.step, "base_loss", prompt, continuation))
        section["samples"] = continuations
        write_section(f"{loaded.stage}_loss", section)
        if loaded.stage != PUBLISHED:  # samples are kept beside the checkpoints of a run
            keep_samples(checkpoint_dir(loaded.stage, loaded.tag), samples)
    return section


if __name__ == "__main__":
    run(device.with_compute(evaluate), Config, __doc__)
