"""Export a model for other programs: Hugging Face transformers and vLLM, or llama.cpp.

python -m nanochat.export ~/my-model
python -m nanochat.export ~/my-model --source base --model_tag d12 --dtype bfloat16
python -m nanochat.export ~/my-model.gguf --format gguf --dtype q8_0
python -m nanochat.export ~/merged --model ./Qwen3-0.6B --adapter ./my-adapter
python -m nanochat.export ./SmolLM2 --from-gguf ./SmolLM2-135M-Instruct.Q4_1.gguf
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from nanochat import device
from nanochat.checkpoint_manager.load import Loaded, load_named
from nanochat.common import UserError, log, tr, write_atomic
from nanochat.data.command_line import run
from nanochat.export import from_gguf, huggingface, llama, ollama
from nanochat.models.lora import merge


@dataclass(frozen=True)
class Config:
    """The command line: which model to export, in which format, and where to."""

    target: Positional[Path]
    """Folder to create, or the file with --format gguf. It must not exist yet."""
    format: Literal["huggingface", "gguf"] = "huggingface"
    """huggingface: a folder that transformers, and vLLM for Qwen and Llama, load without a network.
    gguf: one file for llama.cpp, of a Qwen or Llama model only, with a Modelfile for Ollama."""
    source: Literal["base", "mid", "sft", "rl", "tune"] | None = None
    """Stage of the model. Default: the latest one, in the order rl > sft > mid > base > tune."""
    model_tag: str | None = None
    """Tag of the model, such as d20. Default: the newest."""
    step: int | None = None
    """Step of the checkpoint. Default: the last."""
    model: Path | None = None
    """Folder of a published Qwen or Llama model to export instead:
    config.json, tokenizer.json and safetensors files.
    Or OWNER/NAME, if hf or modelscope has downloaded that model."""
    adapter: Path | None = None
    """Folder of an adapter (LoRA) for the model of --model, as scripts.finetune or peft wrote it;
    it is merged."""
    from_gguf: Path | None = None
    """GGUF file of a Llama or Qwen model to turn into a folder, for fine-tuning and transformers.
    Its weights are dequantised."""
    dtype: Literal["float32", "bfloat16", "float16", "q8_0"] = "float32"
    """Number format of the weights. bfloat16 and float16 halve the size.
    q8_0, for --format gguf, stores matrices as 8-bit integers: about a quarter of the size."""


def load(cfg: Config) -> Loaded:
    """Return the model that the flags select, on the host, with any adapter merged.

    Raises UserError if the flags contradict each other (exit code 2) or loading fails.
    """
    compute = device.compute_init("cpu")
    # Large models fit into memory as bf16, in which most bases are published. Values are rounded to
    # fp16 only when they are written.
    dtype = device.DTYPES["bfloat16"] if cfg.dtype == "bfloat16" else device.MASTER
    loaded = load_named(cfg.model, cfg.adapter, cfg.source, cfg.model_tag, cfg.step, compute, dtype)
    merge(loaded.model)
    return loaded


def _convert(cfg: Config, path: Path, target: Path) -> None:
    """Turn a GGUF file into a folder, and log how to use it.

    Raises UserError (exit code 2) if other flags select a model, or if the file is not supported.
    """
    model_flags = (cfg.model, cfg.adapter, cfg.source, cfg.model_tag, cfg.step)
    if cfg.format != "huggingface" or any(value is not None for value in model_flags):
        raise UserError(
            tr(
                "--from-gguf turns a GGUF file into a folder, and takes no other flag than "
                "--dtype: leave --format, --model, --adapter, --source, --model_tag and --step out"
            ),
            exit_code=2,
        )
    _refuse_q8_0(cfg)
    from_gguf.convert(path, target, cfg.dtype)
    log(
        tr(
            "wrote the model of {path} to {target}: `python -m scripts.chat_cli --model "
            "{target}` chats with it, and `python -m scripts.finetune` trains it",
            path=path,
            target=target,
        )
    )


def _refuse_q8_0(cfg: Config) -> None:
    """Raise UserError (exit code 2) if a folder should get weights in a format of llama.cpp."""
    if cfg.dtype == "q8_0":
        raise UserError(
            tr(
                "q8_0 is a format of GGUF files only, and the target is a folder: add --format "
                "gguf, or choose --dtype bfloat16"
            ),
            exit_code=2,
        )


def _export_gguf(loaded: Loaded, target: Path, dtype: str, about: str) -> None:
    """Write a GGUF file and its Modelfile, and log how other programs load them."""
    chats = ollama.chat_lines(loaded.tokenizer)
    modelfile = ollama.modelfile(target, loaded.tokenizer, chats)
    llama.export(loaded, target, dtype)
    write_atomic(ollama.modelfile_path(target), modelfile)
    log(
        tr(
            "{about}: llama.cpp loads it with `llama-cli -m {target}`, and Ollama with `ollama "
            "create {name} -f {modelfile}`",
            about=about,
            target=target,
            name=target.stem,
            modelfile=ollama.modelfile_path(target),
        )
    )
    if chats is None:
        log(
            tr(
                "the Modelfile has no TEMPLATE, because the model's chat template is neither "
                "exactly ChatML nor that of Llama 3: Ollama since June 2026 takes the template "
                "from the GGUF file, and older versions would chat in a wrong format"
            )
        )


def main(cfg: Config) -> None:
    """Load a model, export it to a new target, and log how other programs can load it."""
    target = cfg.target.expanduser()
    written = [target]
    if cfg.format == "gguf":
        written.append(ollama.modelfile_path(target))
    for path in written:
        if path.exists():
            kind = tr("file") if cfg.format == "gguf" else tr("folder")
            raise UserError(
                tr("{target} exists already: name another {kind}", target=path, kind=kind), 2
            )
    if cfg.from_gguf is not None:
        _convert(cfg, cfg.from_gguf.expanduser(), target)
        return
    if cfg.format != "gguf":
        _refuse_q8_0(cfg)
    loaded = load(cfg)
    about = tr(
        "exported stage {stage}, tag {tag}, step {step:,} to {target}",
        stage=loaded.stage,
        tag=loaded.tag,
        step=loaded.step,
        target=target,
    )
    if cfg.format == "gguf":
        _export_gguf(loaded, target, cfg.dtype, about)
    else:
        huggingface.export(loaded, target, cfg.dtype)
        log(tr("{about}: its README.md says how to load it", about=about))


if __name__ == "__main__":
    run(main, Config, __doc__)
