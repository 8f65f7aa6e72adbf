"""Measures upstream's data loader in a process of its own. Only bench.data starts this file."""

import base64
import json
import time
from typing import Any

import numpy as np
import tiktoken
import torch

from bench import child


def encoding_of(path: str) -> tiktoken.Encoding:
    """Return the vocabulary in one of our tokenizer files; both sides use it."""
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    ranks = [base64.b64decode(token) for token in content["ranks"]]
    specials = content["specials"].values()
    return tiktoken.Encoding(
        name="bench",
        pat_str=content["regex"],
        mergeable_ranks={token: rank for rank, token in enumerate(ranks)},
        special_tokens={spelling: len(ranks) + i for i, spelling in enumerate(specials)},
    )


class CountingTokenizer:
    """A tokenizer that counts what it encodes and remembers each document."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.documents = self.tokens = 0
        self.encoded: set[bytes] = set()

    def get_bos_token_id(self) -> int:
        return self.tokenizer.get_bos_token_id()

    def encode(self, texts: list[str], **options: Any) -> list[list[int]]:
        rows = self.tokenizer.encode(texts, **options)
        self.documents += len(rows)
        self.tokens += sum(map(len, rows))
        self.encoded |= {np.array(ids, np.int64).tobytes() for ids in rows}
        return rows


def pieces(rows: np.ndarray, bos: int) -> list[np.ndarray]:
    """Split rows of int64 (R, T + 1) into documents or parts of documents, each after its begin mark."""
    split_rows = (np.split(row, np.flatnonzero(row == bos)[1:]) for row in rows)
    return [piece for row_pieces in split_rows for piece in row_pieces]


def cropping(make: Any, tokenizer: Any, task: dict[str, Any]) -> dict[str, float]:
    """Return how much of the documents that the loader reads is lost when it crops them to rows."""
    counting = CountingTokenizer(tokenizer)
    loader = make(
        counting,
        task["batch"],
        task["length"],
        "train",
        device="cpu",
    )
    rows = []
    for _ in range(task["batches"]):
        inputs, targets, _ = next(loader)
        rows.append(torch.cat((inputs, targets[:, -1:]), dim=1).numpy().copy())
    waiting = loader.gi_frame.f_locals["doc_buffer"]  # documents that are in no row yet
    in_rows = pieces(np.concatenate(rows), tokenizer.get_bos_token_id())
    used = counting.tokens - sum(map(len, waiting))
    documents = counting.documents - len(waiting)
    uncut = sum(piece.tobytes() in counting.encoded for piece in in_rows)
    return {
        "lost": 1 - sum(map(len, in_rows)) / used,
        "cut_documents": (documents - uncut) / documents,
        "documents": documents,
    }


def main() -> None:
    """Measure the loader's speed first, then count what it crops."""
    answer = child.answers()
    task = child.task()
    from nanochat.dataloader import (
        tokenizing_distributed_data_loader_with_state_bos_bestfit as make,
    )
    from nanochat.tokenizer import RustBPETokenizer

    tokenizer = RustBPETokenizer(encoding_of(task["tokenizer"]), "<|bos|>")
    loader = make(
        tokenizer,
        task["batch"],
        task["length"],
        "train",
        device="cpu",
    )
    start = time.process_time()
    next(loader)
    first = time.process_time() - start
    for _ in range(task["batches"] - 1):
        next(loader)
    tokens = task["batches"] * task["batch"] * task["length"]
    speed = tokens / (time.process_time() - start)
    about = {"first_cpu_seconds": first, "tokens_per_cpu_second": speed}
    answer({**about, **cropping(make, tokenizer, task)})


if __name__ == "__main__":
    main()
