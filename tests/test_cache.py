"""The key-value cache: what it takes of the host's memory before anything is in it."""

from pathlib import Path

import torch

from nanochat.cache import Cache


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_cache_takes_memory_of_a_cpu_only_where_it_is_used() -> None:
    before = resident_bytes()
    cache = Cache(4, 32, 4096, 4, 32, torch.device("cpu"), torch.bfloat16)
    assert 250_000_000 < cache.bytes < 300_000_000
    assert resident_bytes() - before < 20_000_000
    assert not cache.k[2, 31].any() and cache.k.dtype == torch.bfloat16
    cache.v[3, 31, 4095] = 1
    assert int(cache.v[3, 31].sum()) == 4 * 32
