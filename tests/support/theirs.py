"""Models and tokenizers as transformers loads them; importing it takes seconds, so the first call does that."""

from pathlib import Path
from typing import Any


def their_model(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def their_tokenizer(folder: Path, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, **options)
