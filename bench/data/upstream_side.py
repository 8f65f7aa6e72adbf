"""Measures upstream's data loader in its own process, where PYTHONPATH makes `nanochat` upstream's package.

The first argument is the task as JSON, and the answer is one line of JSON. Only bench.data starts this file.
"""

import base64
import json
import os
import sys
import time
from typing import Any

import numpy as np
import tiktoken
import torch


def encoding(path: str) -> tiktoken.Encoding:
    """The vocabulary in one of our tokenizer files; both sides use it."""
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    ranks = [base64.b64decode(token) for token in content["ranks"]]
    return tiktoken.Encoding(
        name="bench",
        pat_str=content["regex"],
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens={
            spelling: len(ranks) + i for i, spelling in enumerate(content["specials"].values())
        },
    )


class Watched:
    """A tokenizer that counts what it encodes and remembers each document."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.documents = self.tokens = 0
        self.whole: set[bytes] = set()

    def get_bos_token_id(self) -> int:
        return self.tokenizer.get_bos_token_id()

    def encode(self, texts: list[str], **more: Any) -> list[list[int]]:
        given = self.tokenizer.encode(texts, **more)
        self.documents += len(given)
        self.tokens += sum(map(len, given))
        self.whole |= {np.array(ids, np.int64).tobytes() for ids in given}
        return given


def pieces(rows: np.ndarray, bos: int) -> list[np.ndarray]:
    """Split rows of int64 (R, T + 1) into documents or parts of documents, each with its begin-of-sequence token."""
    return [piece for row in rows for piece in np.split(row, np.flatnonzero(row == bos)[1:])]


def cropping(make: Any, tokenizer: Any, task: dict[str, Any]) -> dict[str, float]:
    """How much of the documents that the loader reads is lost when it crops them to rows."""
    watched = Watched(tokenizer)
    loader = make(watched, task["batch"], task["length"], "train", device="cpu")
    rows = []
    for _ in range(task["batches"]):
        inputs, targets, _ = next(loader)
        rows.append(torch.cat((inputs, targets[:, -1:]), dim=1).numpy().copy())
    held = loader.gi_frame.f_locals["doc_buffer"]  # documents that were read and are in no row yet
    found = pieces(np.concatenate(rows), tokenizer.get_bos_token_id())
    used, documents = watched.tokens - sum(map(len, held)), watched.documents - len(held)
    whole = sum(piece.tobytes() in watched.whole for piece in found)
    return {
        "lost": 1 - sum(map(len, found)) / used,
        "cut_documents": (documents - whole) / documents,
        "documents": documents,
    }


def main(task: dict[str, Any]) -> None:
    """Measure the loader's speed first, then count what it crops."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # whatever upstream prints must not mix with the answer
    from nanochat.dataloader import (
        tokenizing_distributed_data_loader_with_state_bos_bestfit as make,
    )
    from nanochat.tokenizer import RustBPETokenizer

    tokenizer = RustBPETokenizer(encoding(task["tokenizer"]), "<|bos|>")
    loader = make(tokenizer, task["batch"], task["length"], "train", device="cpu")
    wall, cpu = time.perf_counter(), time.process_time()
    next(loader)
    first, first_cpu = time.perf_counter() - wall, time.process_time() - cpu
    for _ in range(task["batches"] - 1):
        next(loader)
    tokens = task["batches"] * task["batch"] * task["length"]
    result = {
        "first_seconds": first,
        "first_cpu_seconds": first_cpu,
        "tokens_per_cpu_second": tokens / (time.process_time() - cpu),
    }
    print(json.dumps({**result, **cropping(make, tokenizer, task)}), file=answer, flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
