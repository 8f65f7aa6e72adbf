"""Sets the environment variables, time-outs and ports of torch_npu and its collectives.

This module needs no torch.
"""

import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from nanochat.common import tr

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
NEVER = 30 * 24 * 3600  # seconds, for a user who wants collectives to wait without limit
BLOCK = 32  # ports from HCCL_IF_BASE_PORT on that a job's collectives use; 16 before CANN 8.5
# Blocks lie above the ports that Linux assigns automatically (32768-60999).
FIRST_BLOCK = 61008
LAST_BLOCK = 65504


# --- variables -----------------------------------------------------------------------------------

# The first patch of each minor version of torch_npu that reads PYTORCH_ALLOC_CONF (TorchNPU 26.2
# with torch 2.10 or later, found in the compiled library of each wheel). All versions read
# PYTORCH_NPU_ALLOC_CONF.
FIRST_WITH_TORCHS_NAME: dict[tuple[int, ...], int] = {(2, 10): 7, (2, 11): 3, (2, 12): 3}


def allocator_variable(torch_npu: str) -> str:
    """Return the name of the environment variable that configures torch_npu's allocator.

    It is PYTORCH_ALLOC_CONF if the version `torch_npu` reads that, or else PYTORCH_NPU_ALLOC_CONF.
    """
    torchs_name, own_name = ALLOCATORS
    version = re.match(r"(\d+)\.(\d+)", torch_npu)
    patch = re.search(r"post(\d+)", torch_npu)
    minor = tuple(map(int, version.groups())) if version else ()
    if minor >= (2, 13):
        return torchs_name
    first_patch = FIRST_WITH_TORCHS_NAME.get(minor)
    if first_patch is None:
        return own_name
    post = int(patch[1]) if patch else 0
    return torchs_name if post >= first_patch else own_name


def prepare_loading(
    torch_npu: str,
    environ: MutableMapping[str, str] = os.environ,
) -> str:
    """Set the environment variables that torch_npu reads, or return why loading it would abort.

    Returns "" if loading would not abort. `torch_npu` is the version of the package. Variables that
    the user has set are kept. The package aborts the process if both names of the allocator's
    variable are set.

    The task queue lets Python run ahead of the device, the CPU affinity keeps threads on nearby
    cores, and expandable segments keep memory from fragmenting.
    """
    if all(name in environ for name in ALLOCATORS):
        old, new = ALLOCATORS
        return tr("{old} and {new} are both set, on which it aborts; unset {new}", old=old, new=new)
    environ.setdefault("TASK_QUEUE_ENABLE", "2")
    environ.setdefault("CPU_AFFINITY_CONF", "2")
    if not any(name in environ for name in ALLOCATORS):
        environ[allocator_variable(torch_npu)] = "expandable_segments:True"
    return ""


def use_ready_kernels(npu: Any, environ: Mapping[str, str] = os.environ) -> None:
    """Make torch_npu, whose torch.npu is `npu`, take kernels from CANN's ops package where it can.

    By default, it does so only from the 910B1 on. A 910A or 310P compiles an operator, which takes
    seconds, each time its inputs have a new shape: replies and evaluations would hardly move. With
    NPU_JIT_COMPILE=1, every chip compiles, which may suit a run whose shapes stay the same.
    """
    npu.set_compile_mode(jit_compile=environ.get("NPU_JIT_COMPILE", "0") not in ("", "0"))


def prepare_collectives(environ: MutableMapping[str, str] = os.environ) -> int:
    """Set HCCL's environment variables, and return the process group's time-out in seconds.

    Variables that the user has set are kept. Ranks get 20 minutes to connect, because loading can
    take minutes. Each time-out must exceed those that can expire within it, or else the original
    cause is never reported.
    """
    environ.setdefault("HCCL_CONNECT_TIMEOUT", "1200")
    environ.setdefault("HCCL_WHITELIST_DISABLE", "1")
    seconds = environ.get("HCCL_EXEC_TIMEOUT", "")
    inner = int(seconds) if seconds.isdigit() else 1836  # HCCL's default
    if inner == 0:  # to HCCL, 0 means no time-out, and no outer time-out may cut the wait short
        return NEVER
    if seconds.isdigit():
        environ.setdefault("HCCL_EVENT_TIMEOUT", str(inner + 120))
    return max(2400, inner + 300)


def card_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of a card's device file, or "" if this host has no card.

    Tests set ASCEND_ROOT_PREFIX to the root folder of a fake host.
    """
    folder = Path(environ.get("ASCEND_ROOT_PREFIX", "") + "/dev")
    cards = []
    for path in folder.glob("davinci[0-9]*"):
        number = path.name.removeprefix("davinci")
        if number.isdigit():
            cards.append(path)
    return str(min(cards, default=""))


# --- ports ---------------------------------------------------------------------------------------


def port_taken(port: int) -> bool:
    """Return whether a port cannot be bound, most often because a process listens on it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _claim(port: int) -> socket.socket | None:
    """Return a socket that reserves a port for this job, or None if the port is already reserved.

    Collectives bind their ports only when the ranks first meet, so jobs that start together would
    all find the same ports free. A job therefore also binds an abstract Unix socket for each port.
    The names of such sockets belong to the same network namespace as the ports (also in containers
    with --network host), and vanish when the process ends, however it ends.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":  # other systems have neither such names nor cards
            claim.bind(f"\0nanochat-hccl-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


class PortBlocks:
    """The blocks of ports that a process reserves for its job's collectives.

    They stay reserved until release() or the end of this object.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[socket.socket]] = {}

    def hold(self, base: int) -> int:
        """Reserve the block of ports that starts at `base`, and return 0.

        If a port of the block is already taken, returns that port and reserves nothing.
        """
        if base in self._held:
            return 0
        claims: list[socket.socket] = []
        for port in range(base, min(base + BLOCK, 65536)):
            claim = _claim(port)
            if claim is not None:
                claims.append(claim)
            if claim is None or port_taken(port):
                _close(claims)
                return port
        self._held[base] = claims
        return 0

    def release(self, base: int) -> None:
        """Release a reserved block, so that other processes can use it."""
        _close(self._held.pop(base, []))

    def free(self, first: int = FIRST_BLOCK, hold: bool = False) -> int:
        """Return the first port of a free block, or 0 if no block is free.

        The search begins with the block at `first`. With `hold`, the block found is also reserved.
        """
        for base in range(first, LAST_BLOCK, BLOCK):
            if base in self._held or self.hold(base):
                continue
            if not hold:
                self.release(base)
            return base
        return 0


def _close(claims: Iterable[socket.socket]) -> None:
    for claim in claims:
        claim.close()


def block_words(base: int, taken_port: int) -> str:
    """Return a message that the block of ports at `base` is taken, naming a free block to use."""
    free = PortBlocks().free()
    return tr(
        "HCCL_IF_BASE_PORT={base} needs ports {base} to {last} for this job's collectives, and port "
        "{taken_port} is taken by another. Leave it out to have a block chosen, or use "
        "HCCL_IF_BASE_PORT={free}",
        base=base,
        last=base + BLOCK - 1,
        taken_port=taken_port,
        free=free,
    )
