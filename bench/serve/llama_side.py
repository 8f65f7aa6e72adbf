"""Runs llama.cpp's server in a process of its own, until bench.serve ends it."""

import signal
from typing import Any

import xllamacpp as library

from bench import child

xllamacpp: Any = library  # a compiled module without types


def parameters(task: dict[str, Any]) -> Any:
    """Return one thread, continuous batching, and llama.cpp's own defaults for everything else."""
    params = xllamacpp.CommonParams()
    params.model.path = task["path"]
    params.n_ctx = task["slots"] * task["length"]
    params.n_parallel = task["slots"]
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.cont_batching = True
    params.fit_params = False
    return params


if __name__ == "__main__":
    server = xllamacpp.Server(parameters(child.task()))
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()
