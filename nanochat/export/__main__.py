"""Export a model for other programs: Hugging Face transformers and vLLM, or llama.cpp.

python -m nanochat.export ~/my-model
python -m nanochat.export ~/my-model --source base --model_tag d12 --dtype bfloat16
python -m nanochat.export ~/my-model.gguf --format gguf --dtype float16
python -m nanochat.export ~/merged --model ./Qwen3-0.6B --adapter ./my-adapter
python -m nanochat.export ./SmolLM2 --from-gguf ./SmolLM2-135M-Instruct.Q4_1.gguf
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from nanochat import device
from nanochat.checkpoint_manager.load import Loaded, load_model, load_published
from nanochat.common import UserError, log, run
from nanochat.export import from_gguf, huggingface, llama
from nanochat.models.lora import merge


@dataclass(frozen=True)
class Config:
    """The command line: which model to export, in which format, and where to."""

    target: Positional[Path]
    """Folder to create, or the file with --format gguf. It must not exist yet."""
    format: Literal["huggingface", "gguf"] = "huggingface"
    """huggingface: a folder that transformers, and for Qwen models vLLM, load without a network.
    gguf: one file for llama.cpp and what is built on it; models of the Qwen family only"""
    source: Literal["base", "mid", "sft", "rl", "tune"] | None = None
    """Stage of the model. Default: the latest one, in the order rl > sft > mid > base > tune."""
    model_tag: str | None = None
    """Tag of the model, such as d20. Default: the newest."""
    step: int | None = None
    """Step of the checkpoint. Default: the last."""
    model: Path | None = None
    """Folder of a published Qwen model to export instead:
    config.json, tokenizer.json and safetensors files."""
    adapter: Path | None = None
    """Folder of an adapter (LoRA) for the model of --model, as scripts.finetune or peft wrote it;
    it is merged."""
    from_gguf: Path | None = None
    """GGUF file of a Llama or Qwen model to turn into a folder, for fine-tuning and transformers.
    Its weights are dequantised."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of the weights. bfloat16 and float16 halve the size."""


def load(cfg: Config) -> Loaded:
    """Return the model that the flags select, on the host, with any adapter merged.

    Raises UserError if the flags contradict each other (exit code 2) or loading fails.
    """
    if cfg.model is None and cfg.adapter is not None:
        raise UserError(
            "--adapter belongs to a published model: name its folder with --model", exit_code=2
        )
    if cfg.model is not None and (cfg.source or cfg.model_tag or cfg.step is not None):
        raise UserError(
            "--model names a published model, and --source, --model_tag and --step one that was "
            "trained here: give either",
            exit_code=2,
        )
    compute = device.compute_init("cpu")
    # Large models fit into memory as bf16, in which most bases are published. Values are rounded to
    # fp16 only when they are written.
    dtype = device.DTYPES["bfloat16"] if cfg.dtype == "bfloat16" else device.MASTER
    if cfg.model is not None:
        return load_published(cfg.model, cfg.adapter, compute, dtype)
    loaded = load_model(cfg.source, cfg.model_tag, cfg.step, compute, dtype=dtype)
    merge(loaded.model)
    return loaded


def _convert(cfg: Config, path: Path, target: Path) -> None:
    """Turn a GGUF file into a folder, and log how to use it.

    Raises UserError (exit code 2) if other flags select a model, or if the file is not supported.
    """
    if cfg.format != "huggingface" or (cfg.model, cfg.adapter, cfg.source) != (None, None, None):
        raise UserError(
            "--from-gguf turns a GGUF file into a folder, and takes no other flag than --dtype: "
            "leave --format, --model, --adapter and --source out",
            exit_code=2,
        )
    from_gguf.convert(path, target, cfg.dtype)
    log(
        f"wrote the model of {path} to {target}: `python -m scripts.chat_cli --model {target}` "
        "chats with it, and `python -m scripts.finetune` trains it"
    )


def main(cfg: Config) -> None:
    """Load a model, export it to a new target, and log how other programs can load it."""
    target = cfg.target.expanduser()
    if cfg.from_gguf is not None:
        _convert(cfg, cfg.from_gguf.expanduser(), target)
        return
    if target.exists():
        kind = "file" if cfg.format == "gguf" else "folder"
        raise UserError(f"{target} exists already: name another {kind}", 2)
    loaded = load(cfg)
    about = f"exported stage {loaded.stage}, tag {loaded.tag}, step {loaded.step:,} to {target}"
    if cfg.format == "gguf":
        llama.export(loaded, target, cfg.dtype)
        log(f"{about}: llama.cpp loads it with `llama-cli -m {target}`")
    else:
        huggingface.export(loaded, target, cfg.dtype)
        log(f"{about}: its README.md says how to load it")


if __name__ == "__main__":
    run(main, Config, __doc__)
