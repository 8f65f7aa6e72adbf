"""Runs llama.cpp's server in a process of its own, until it is ended. Only bench.serve starts this file.

The argument is JSON: the path of a GGUF file, how many slots there are, and how many tokens each of them has.
"""

import json
import signal
import sys
from typing import Any

import xllamacpp as library

xllamacpp: Any = library  # a compiled module without types


def parameters(task: dict[str, Any]) -> Any:
    """One thread, continuous batching, and llama.cpp's own defaults for everything else."""
    given = xllamacpp.CommonParams()
    given.model.path = task["path"]
    given.n_ctx, given.n_parallel = task["slots"] * task["length"], task["slots"]
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.cont_batching, given.fit_params = True, False
    return given


if __name__ == "__main__":
    server = xllamacpp.Server(parameters(json.loads(sys.argv[1])))
    print(f"listening on {server.listening_address}", flush=True)
    signal.pause()
