"""Starts a process for each device as torchrun does, with torchrun's flags, and prints last why one of them failed.

python -m nanochat.runtime.launch --nproc_per_node=8 -m scripts.base_train -- --depth=20

Two things differ from torchrun. On one host everything that the processes meet at listens on 127.0.0.1 only. After a
failure the last line names the rank and its reason, where torchrun prints a traceback of its own.
"""

import os
import re
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

from nanochat.common import note_end

LOOPBACK = "127.0.0.1"
MEETING_SECONDS = 60
RESUMES = ". The same command, without --resume, resumes"
OUT_OF_MEMORY = (
    ". If nobody killed it, the host ran out of memory, as `dmesg` shows: use fewer ranks, or lower --device_batch_size"
    f"{RESUMES}"
)


class OneHost(StaticTCPRendezvous):
    """Where the ranks of one host meet. torchrun's own store listens on every address and unpickles what it is sent."""

    def __init__(self, parameters: RendezvousParameters):
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        super().__init__(LOOPBACK, port, 0, 1, parameters.run_id, MEETING_SECONDS)
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        """The name under which torchrun knows it."""
        return "one-host"


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank to blame: the first that left a reason, else one that was killed, else one that the launcher did not
    end itself (SIGTERM)."""

    def order(item: tuple[int, ProcessFailure]) -> tuple[bool, bool, bool, int]:
        code, noted = item[1].exitcode, isinstance(item[1].message, dict)
        return not noted, code != -signal.SIGKILL, code == -signal.SIGTERM, item[1].timestamp

    return min(failures.items(), key=order)


def reason(failures: Mapping[int, ProcessFailure]) -> str:
    """Why the ranks failed: what the first said itself, or which signal ended it."""
    rank, first = root_cause(failures)
    killed = [other for other, failure in failures.items() if failure.exitcode == -signal.SIGKILL]
    said: Any = first.message  # a dict, if the rank left a note
    if isinstance(said, dict):
        text = str(said["message"])
        text = text if "(rank " in text else f"error: {text} (rank {rank})"
        gone = [other for other in killed if f"rank {other} is gone" in text]
        return f"{text} Rank {gone[0]} was killed (SIGKILL){OUT_OF_MEMORY}" if gone else text
    if first.exitcode == -signal.SIGKILL:
        return f"error: rank {rank} was killed (SIGKILL){OUT_OF_MEMORY}"
    if first.exitcode < 0:
        return f"error: rank {rank} was ended by {first.signal_name()}; the lines above may say why{RESUMES}"
    return f"error: rank {rank} ended with code {first.exitcode}; the lines above say why"


def main(words: Sequence[str]) -> int:
    """Run the ranks; returns the exit code of the rank that failed first, or 0."""
    options = parse_args(list(words))
    if options.standalone or (options.nnodes in ("1", "1:1") and not options.rdzv_endpoint):
        rendezvous_handler_registry.register("one-host", OneHost)
        options.standalone, options.rdzv_backend = False, "one-host"
        options.rdzv_endpoint, options.rdzv_id = f"{LOOPBACK}:0", str(uuid.uuid4())
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        run(options)
        return 0
    except ChildFailedError as failed:
        code = root_cause(failed.failures)[1].exitcode
        return end(reason(failed.failures), code if code > 0 else 128 - code)
    except SignalException as stopped:
        return end(
            f"stopped by {stopped.sigval.name}; the same command, without --resume, resumes",
            128 + stopped.sigval,
        )
    except (DistError, RendezvousConnectionError) as failure:
        return end(
            f"error: {no_meeting(str(failure.__cause__ or failure))} (launcher of host {options.node_rank})",
            1,
        )


def no_meeting(failure: str) -> str:
    """Why the launchers of several hosts did not meet."""
    if "EADDRINUSE" in failure:
        from nanochat.device import (
            port_words,
        )  # not at the top, since it would load the accelerator's libraries

        return port_words(next(iter(re.findall(r"port: (\d+)", failure)), ""))
    return (
        f"the hosts did not meet: {failure.splitlines()[0]}. Start the command on every host within a minute, with one "
        "address and port of the first host, which the others must reach"
    )


def end(message: str, code: int) -> int:
    """Print the last line, and leave it for the script that started this launcher."""
    note_end(message)
    print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
