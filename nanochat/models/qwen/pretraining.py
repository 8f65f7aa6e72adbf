"""The shape of a Qwen3 to pretrain, and checks of flags that do not apply to it."""

from collections.abc import Mapping

from nanochat.common import UserError, log, tr
from nanochat.models.qwen.config import QwenConfig


def check_flags(gpt_only: Mapping[str, int | str], window_pattern: str, gpt_pattern: str) -> None:
    """Raise UserError (exit code 2) if flags ask for what only a GPT has.

    `gpt_only` has the values of such flags by name, which must be 0 or "auto". The window patterns
    "L" (no windows) and `gpt_pattern` (a GPT's default) are accepted.
    """
    for name, value in gpt_only.items():
        if value not in (0, "auto"):
            raise UserError(
                tr(
                    "only a GPT has {name}, and a Qwen3 has none, got --{name}={value}: leave the "
                    "flag out",
                    name=name,
                    value=value,
                ),
                exit_code=2,
            )
    if window_pattern not in (gpt_pattern, "L"):
        raise UserError(
            tr(
                "a Qwen3 sees the whole context in every layer, got "
                "--window_pattern={window_pattern}: leave the flag out",
                window_pattern=window_pattern,
            ),
            exit_code=2,
        )


def shape_of(
    depth: int, model_dim: int, head_dim: int, sequence_len: int, vocab_size: int
) -> QwenConfig:
    """Return the shape of a Qwen3 of `depth` layers.

    The MLP has about 8/3 as many channels as the model, so that a layer has about as many
    parameters as a GPT's.
    """
    heads = model_dim // head_dim
    hidden = -(-8 * model_dim // (3 * 64)) * 64
    return QwenConfig(
        sequence_len,
        vocab_size,
        depth,
        model_dim,
        heads,
        heads,
        head_dim,
        hidden,
        rope_theta=10_000.0,
        tied=0,
    )


def advise(pattern: str) -> None:
    """Log a warning if llama.cpp cannot split texts by a tokenizer's split pattern."""
    if pattern != "qwen2":
        log(
            tr(
                "llama.cpp does not split texts as this tokenizer does: if the model is to "
                "become a GGUF file, stop, and train the tokenizer with --pattern qwen2"
            )
        )
