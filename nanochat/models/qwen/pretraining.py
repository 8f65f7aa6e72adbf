"""What pretraining needs to know of a Qwen3: its shape, and the flags that it cannot take."""

from nanochat.common import UserError, log
from nanochat.models.qwen.config import QwenConfig


def check_flags(bigram_rows: int | str, window_pattern: str, gpt_pattern: str) -> None:
    """Raise UserError (exit code 2) for flags of what a Qwen3 does not have.

    `gpt_pattern` is the window pattern of a GPT where none is asked for.
    """
    if bigram_rows not in (0, "auto"):
        raise UserError(
            f"a Qwen3 has no bigrams, got --bigram_rows={bigram_rows}: leave the flag out",
            exit_code=2,
        )
    if window_pattern not in (gpt_pattern, "L"):
        raise UserError(
            "a Qwen3 sees the whole context in every layer, got "
            f"--window_pattern={window_pattern}: leave the flag out",
            exit_code=2,
        )


def shape_of(
    depth: int, model_dim: int, head_dim: int, sequence_len: int, vocab_size: int
) -> QwenConfig:
    """Return the shape of a Qwen3 of `depth` layers.

    Its MLP has 8/3 of the channels, so that its layers have about as many parameters as a GPT's.
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
    """Log what a tokenizer's split pattern means for the model's way to llama.cpp."""
    if pattern != "qwen2":
        log(
            "llama.cpp does not split texts as this tokenizer does: if the model is to become a "
            "GGUF file, stop, and train the tokenizer with --pattern qwen2"
        )
