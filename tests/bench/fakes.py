"""Made-up checkouts of upstream, with the API that benchmarks use, and small rows."""

from pathlib import Path

from bench.text import Text, make_rows
from bench.train.variants import Plan
from nanochat.gpt import GPTConfig

TINY = GPTConfig(
    sequence_len=16,
    vocab_size=300,
    n_layer=2,
    n_head=2,
    n_kv_head=2,
    n_embd=32,
    window_pattern="L",
)
TEXT = Text(
    [f"the cat number {i} sat on the mat of cat {i + 1} and saw {i * i} dogs" for i in range(60)],
    "cats",
)

# A model of one table, whose first pass takes as long as a compiler.
UPSTREAM = """
import os, time
import torch
import torch.nn.functional as F

class GPTConfig:
    def __init__(self, **sizes):
        self.sizes = sizes

class GPT(torch.nn.Module):
    passes = 0

    def __init__(self, config):
        super().__init__()
        print("chatter that is no answer")
        vocab_size = config.sizes["vocab_size"]
        self.table = torch.nn.Embedding(vocab_size, vocab_size)

    def init_weights(self):
        torch.nn.init.zeros_(self.table.weight)

    def setup_optimizer(self, unembedding_lr, embedding_lr, matrix_lr, weight_decay, scalar_lr):
        return torch.optim.SGD(self.parameters(), lr=matrix_lr / 0.02, momentum=0.1)

    def forward(self, idx, targets, kv_cache=None, loss_reduction="mean"):
        start = time.process_time()
        while GPT.passes == 0 and time.process_time() - start < 0.3:
            pass
        GPT.passes += 1
        logits = self.table(idx).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=loss_reduction)
"""


def fake_upstream(folder: Path, source: str = UPSTREAM) -> Path:
    """Make a checkout whose gpt.py has this source."""
    (folder / "nanochat").mkdir(parents=True)
    for name, text in (
        ("__init__", ""),
        ("gpt", source),
        ("optim", ""),
        ("flash_attention", "USE_FA3 = True\n"),
    ):
        (folder / "nanochat" / f"{name}.py").write_text(text)
    return folder


def tiny_plan(folder: Path, **settings: int) -> Plan:
    """Make small rows, and a plan to train on them."""
    make_rows(folder, TINY.vocab_size, TINY.sequence_len, TEXT)
    return Plan(TINY, folder, rows_per_step=4, held_out=4, **settings)
