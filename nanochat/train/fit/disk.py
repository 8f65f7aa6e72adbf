"""How much disk a run takes: texts, tokens, conversations and checkpoints."""

import math
from collections.abc import Mapping

import numpy as np

from nanochat.data.sources.published import SOURCES
from nanochat.prepare.token_files import dtype_for
from nanochat.train.flags import RunFlags

SPEEDRUN = ("base", "mid", "sft", "rl")  # the stages of a speedrun that save checkpoints
CORPUS = "fineweb"  # what the presets of a speedrun download
SHARDS = {12: 40, 20: 120}  # training shards that the presets download, by depth, as in speedrun.sh
SHARD_TOKENS = 50e6

# Bytes of tokens for each byte of text, at most, with two bytes for each token: a shard of 100 MB
# holds 50 million tokens, and the packing plan takes a few percent more.
TOKENS = 1.1
# Besides tensors a checkpoint holds the tokenizer, the ages of bigrams and the variances of Muon.
BESIDE_TENSORS = 1.01
# SmolTalk is 1.0 GB of parquet, which `datasets` unpacks to 1.9 GB (its data card). The other
# published tasks are small. mid_train turns all conversations into some 450 million tokens, and
# each token takes two bytes and one of its mask.
DOWNLOADS, CHATS = 3.5e9, 1.5e9


def of_run(
    checkpoint: float, texts: Mapping[str, float], vocab_size: int, published_chats: bool
) -> dict[str, float]:
    """Return the bytes that each part of a run takes at most, by the name of the part.

    `checkpoint` is the bytes of its tensors (optim.saved_bytes), `texts` the bytes of the shards
    of each corpus. `published_chats`: the later stages learn from the published conversations.
    Every stage keeps its newest checkpoints. Only the stage that runs holds one more, "newest",
    because it deletes its oldest checkpoint after it has written a new one.
    """
    width = np.dtype(dtype_for(vocab_size)).itemsize / 2
    checkpoint_bytes = BESIDE_TENSORS * checkpoint
    return {
        **{f"texts {name}": size for name, size in texts.items()},
        **{f"tokens {name}": width * TOKENS * size for name, size in texts.items()},
        "downloads": DOWNLOADS if published_chats else 0.0,
        "chats": CHATS if published_chats else 0.0,
        **{stage: RunFlags.keep * checkpoint_bytes for stage in SPEEDRUN},
        "newest": checkpoint_bytes,
    }


def of_speedrun(depth: int, tokens: float, checkpoint: float, vocab_size: int) -> float:
    """Return the bytes that a speedrun with a model of a depth writes at most.

    A depth without a preset downloads as many shards as hold `tokens` tokens.
    """
    shards = SHARDS.get(depth) or math.ceil(tokens / SHARD_TOKENS)
    texts = {CORPUS: (shards + 1) * SOURCES[CORPUS].file_bytes}  # one more is for validation
    return sum(of_run(checkpoint, texts, vocab_size, published_chats=True).values())
