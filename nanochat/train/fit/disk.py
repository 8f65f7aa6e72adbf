"""Estimates the disk space of a run: its texts, tokens, conversations and checkpoints."""

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch.nn as nn

from nanochat.data.sources.published import SOURCES
from nanochat.model import Model
from nanochat.optim import OneRate, Rates
from nanochat.prepare.token_files import dtype_for
from nanochat.runtime.parallel import trained
from nanochat.train.flags import RunFlags

SPEEDRUN = ("base", "mid", "sft", "rl")  # the stages of a speedrun that save checkpoints
CORPUS = "fineweb"  # the corpus that the presets of a speedrun download
SHARDS = {12: 40, 20: 120}  # training shards that the presets of speedrun.sh download, by depth
SHARD_TOKENS = 50e6

# The most bytes of tokens per byte of text, if a token takes two bytes. A shard of 100 MB holds 50
# million tokens, and the packing plan takes a few percent more.
TOKENS = 1.1
# Besides tensors, a checkpoint holds the tokenizer, the ages of bigrams and Muon's variances.
BESIDE_TENSORS = 1.01
# SmolTalk is 1.0 GB of parquet, which `datasets` unpacks to 1.9 GB (its data card). The other
# published tasks are small. mid_train turns all conversations into some 450 million tokens, each of
# which takes two bytes, plus one for its mask.
DOWNLOADS, CHATS = 3.5e9, 1.5e9


def saved_bytes(model: Model, rates: Rates | OneRate) -> int:
    """Return roughly how many bytes the parameters and optimizer state of a checkpoint take.

    AdamW saves two moments of each parameter, but only one of the table of bigrams, whose first
    beta is 0. Muon saves one.
    """
    roles = model.parameter_roles()
    one_moment = {"bigram", "matrix"} if rates.matrix_optimizer == "muon" else {"bigram"}
    return sum(
        parameter.nbytes * (2 if roles[name] in one_moment else 3)
        for name, parameter in trained(cast(nn.Module, model))
    )


def of_checkpoints(checkpoint: float, count: int = 1) -> float:
    """Return the bytes of `count` checkpoints whose tensors take `checkpoint` bytes each."""
    return count * BESIDE_TENSORS * checkpoint


def of_run(
    checkpoint: float, texts: Mapping[str, float], vocab_size: int, published_chats: bool
) -> dict[str, float]:
    """Return a dict from each kind of data in a run to the most bytes that it takes on disk.

    `checkpoint` is the number of bytes in a checkpoint's tensors (saved_bytes), and `texts`
    maps each corpus to the bytes of its shards. `published_chats` says whether later stages learn
    from the published conversations. Every stage keeps its newest checkpoints, and the stage that
    is running holds one more, "newest", because it writes a new checkpoint before it deletes the
    oldest.
    """
    width = np.dtype(dtype_for(vocab_size)).itemsize / 2
    return {
        **{f"texts {name}": size for name, size in texts.items()},
        **{f"tokens {name}": width * TOKENS * size for name, size in texts.items()},
        "downloads": DOWNLOADS if published_chats else 0.0,
        "chats": CHATS if published_chats else 0.0,
        **{stage: of_checkpoints(checkpoint, RunFlags.keep) for stage in SPEEDRUN},
        "newest": of_checkpoints(checkpoint),
    }


def of_speedrun(
    depth: int,
    tokens: float,
    checkpoint: float,
    vocab_size: int,
    corpus: str = CORPUS,
    shards: int | None = None,
) -> float:
    """Return the most bytes that a speedrun takes on disk for a model of the given depth.

    It downloads `shards` training shards of `corpus`: by default those of the preset for the depth
    or, if there is none, enough to hold `tokens` tokens.
    """
    shards = shards or SHARDS.get(depth) or math.ceil(tokens / SHARD_TOKENS)
    texts = {corpus: (shards + 1) * SOURCES[corpus].file_bytes}  # one more shard for validation
    return sum(of_run(checkpoint, texts, vocab_size, published_chats=True).values())
