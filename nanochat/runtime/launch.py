"""Starts a process for each device, as torchrun does, and explains a failure in the last line.

python -m nanochat.runtime.launch --nproc_per_node=8 -m scripts.base_train -- --depth=20

It takes torchrun's flags, and differs from torchrun in two ways. On a single host, the port where
the processes meet listens only on 127.0.0.1, unless --rdzv_endpoint names another. After a failure,
the last line gives the reason and the rank or host that failed, where torchrun would print a
traceback of its own. The ranks leave their reasons to the launcher and do not print them.
"""

import logging
import os
import re
import signal
import socket
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed import DistError, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.agent.server import api as agent_api
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

from nanochat.common import tr
from nanochat.data.command_line import LAUNCHED, note_end, with_rank

LOOPBACK = "127.0.0.1"
MEETING_SECONDS = 60
ONE_HOST = ("1", "1:1")  # values of --nnodes


class OneHost(StaticTCPRendezvous):
    """A rendezvous for the ranks of a single host, whose store listens only on 127.0.0.1.

    torchrun's own store listens on every address and unpickles whatever it receives.
    """

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
        """Return the name under which this class is registered with torchrun."""
        return "one-host"


def root_cause(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that most likely caused the failure, and its failure record.

    Ranks that left a reason come first, then ranks that were killed (SIGKILL), and last those that
    ended on SIGTERM, which the launcher sends. Among equals, the earliest counts.
    """

    def order(rank: int) -> tuple[bool, bool, bool, int]:
        failure = failures[rank]
        left_no_reason = not isinstance(failure.message, dict)
        was_not_killed = failure.exitcode != -signal.SIGKILL
        was_ended_by_launcher = failure.exitcode == -signal.SIGTERM
        return left_no_reason, was_not_killed, was_ended_by_launcher, failure.timestamp

    rank = min(failures, key=order)
    return rank, failures[rank]


def reason(failures: Mapping[int, ProcessFailure]) -> str:
    """Return the error message that the failing rank left, or else a message on how it ended."""
    rank, failure = root_cause(failures)
    note: Any = failure.message  # a dict, if the rank left a note
    if isinstance(note, dict):
        return _noted_reason(rank, str(note["message"]), failures)
    if failure.exitcode == -signal.SIGKILL:
        return tr(
            "error: rank {rank} was killed (SIGKILL). {advice}", rank=rank, advice=_memory_advice()
        )
    if failure.exitcode < 0:
        return tr(
            "error: rank {rank} was ended by {signal}; the lines above may say why. The same "
            "command, without --resume, resumes",
            rank=rank,
            signal=failure.signal_name(),
        )
    return tr(
        "error: rank {rank} ended with code {code}; the lines above say why",
        rank=rank,
        code=failure.exitcode,
    )


def _memory_advice() -> str:
    return tr(
        "If nobody killed it, the host ran out of memory, as `dmesg` shows: use fewer ranks, or "
        "lower --device_batch_size. The same command, without --resume, resumes"
    )


def _noted_reason(rank: int, text: str, failures: Mapping[int, ProcessFailure]) -> str:
    """Return the message `text` that a rank has left, with the rank's index.

    If the message says that another rank is gone, and that rank was killed, add the likely cause.
    """
    if not text.endswith(with_rank("", rank)):
        text = tr("error: {mistake}", mistake=with_rank(text, rank))
    for other, failure in failures.items():
        is_named = tr("rank {rank} is gone", rank=other) in text
        if failure.exitcode == -signal.SIGKILL and is_named:
            return tr(
                "{text} Rank {rank} was killed (SIGKILL). {advice}",
                text=text,
                rank=other,
                advice=_memory_advice(),
            )
    return text


def main(words: Sequence[str]) -> int:
    """Run the ranks, explain a failure if there is one, and return the exit code.

    The code is that of the failing rank, 128 + N if signal N ended that rank or the launcher, 1 if
    the launchers could not meet, or else 0.
    """
    # It would print which process it ends and why, which the last line says better.
    logging.getLogger(multiprocessing_api.__name__).setLevel(logging.CRITICAL)
    # It would print in English that a signal came, which the ranks say. A second signal that came
    # while it prints would be swallowed, with a traceback.
    logging.getLogger(agent_api.__name__).setLevel(logging.ERROR)
    options = parse_args(list(words))
    os.environ[LAUNCHED] = "1"
    is_one_host = options.nnodes in ONE_HOST and not options.rdzv_endpoint
    if options.standalone or is_one_host:
        rendezvous_handler_registry.register("one-host", OneHost)
        options.standalone = False
        options.rdzv_backend = "one-host"
        options.rdzv_endpoint = f"{LOOPBACK}:0"
        options.rdzv_id = str(uuid.uuid4())
        if "lo" in [name for _, name in socket.if_nameindex()]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        run(options)
        return 0
    except ChildFailedError as failure:
        code = root_cause(failure.failures)[1].exitcode
        return end(reason(failure.failures), code if code > 0 else 128 - code)
    except SignalException as stop:
        return end(
            tr(
                "stopped by {signal}; the same command, without --resume, resumes",
                signal=stop.sigval.name,
            ),
            128 + stop.sigval,
        )
    except (DistError, RendezvousConnectionError) as failure:
        why = no_meeting(str(failure.__cause__ or failure))
        message = tr("error: {why} (launcher of host {host})", why=why, host=options.node_rank)
        return end(message, 1)


def no_meeting(failure: str) -> str:
    """Return a message for the user about the error that kept the launchers from meeting."""
    if "EADDRINUSE" in failure:
        # Not imported at the top, since it would load the accelerator's libraries.
        from nanochat.device import port_words

        port = re.search(r"port: (\d+)", failure)
        return port_words(port[1] if port else "")
    return tr(
        "the hosts did not meet: {why}. Start the command on every host within a minute, with one "
        "address and port of the first host, which the others must reach",
        why=failure.splitlines()[0],
    )


def end(message: str, code: int) -> int:
    """Hand `message` to the script that started this launcher, or print it, and return `code`."""
    if not note_end(message):
        print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
