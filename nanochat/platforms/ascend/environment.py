"""The environment of torch_npu and of Ascend's collectives: variables, time-outs and ports; needs no torch."""

import os
import re
import socket
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF")
NEVER = 30 * 24 * 3600  # seconds, for a user who wants collectives to wait without end
BLOCK = 32  # ports that a job's collectives take from HCCL_IF_BASE_PORT on: 16 before CANN 8.5
# Blocks lie above the ports that Linux hands out by itself (32768-60999).
FIRST_BLOCK = 61008
LAST_BLOCK = 65504


# --- variables -----------------------------------------------------------------------------------

# The first patch of each minor of torch_npu in which PYTORCH_ALLOC_CONF is read (TorchNPU 26.2 with torch 2.10 or
# later, seen in the compiled library of each wheel); all read PYTORCH_NPU_ALLOC_CONF.
FIRST_WITH_TORCHS_NAME: dict[tuple[int, ...], int] = {(2, 10): 7, (2, 11): 3, (2, 12): 3}


def allocator_variable(torch_npu: str) -> str:
    """Return the variable by which a torch_npu is best told how to allocate.

    It is torch's own name where this torch_npu reads that.
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
    """Set what a version of torch_npu reads while it loads, where the user has not.

    Returns why loading would abort, or "".

    The task queue lets Python run ahead of the device, the affinity keeps its threads on near cores, and segments
    that grow keep the memory from fragmenting. Both names of the allocator's variable at once abort the process.
    """
    if all(name in environ for name in ALLOCATORS):
        return f"{ALLOCATORS[0]} and {ALLOCATORS[1]} are both set, on which it aborts; unset {ALLOCATORS[1]}"
    environ.setdefault("TASK_QUEUE_ENABLE", "2")
    environ.setdefault("CPU_AFFINITY_CONF", "2")
    if not any(name in environ for name in ALLOCATORS):
        environ[allocator_variable(torch_npu)] = "expandable_segments:True"
    return ""


def prepare_collectives(environ: MutableMapping[str, str] = os.environ) -> int:
    """Set the time-outs of collectives, where the user has not.

    Returns the seconds that the process group must wait.

    Ranks may load for minutes before they first meet. Each outer time-out must exceed the time-out inside it, or the
    innermost cause is never named.
    """
    environ.setdefault("HCCL_CONNECT_TIMEOUT", "1200")
    environ.setdefault("HCCL_WHITELIST_DISABLE", "1")
    seconds = environ.get("HCCL_EXEC_TIMEOUT", "")
    inner = int(seconds) if seconds.isdigit() else 1836  # its default
    if inner == 0:  # HCCL's word for never, which no outer time-out may cut short
        return NEVER
    if seconds.isdigit():
        environ.setdefault("HCCL_EVENT_TIMEOUT", str(inner + 120))
    return max(2400, inner + 300)


def card_file(environ: Mapping[str, str] = os.environ) -> str:
    """Return the device file of this host's first card, whether or not torch_npu can use it.

    "" if there is none. ASCEND_ROOT_PREFIX names the root folder of a fake host in tests.
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
    """Return whether another process listens on a port of this host."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _claim(port: int) -> socket.socket | None:
    """Claim a port for this job; None if another process has claimed the port.

    Collectives bind their ports only when the ranks first meet, so that jobs which start together all find the same
    ports free. A job therefore also takes a name for each port, among the kernel's unix sockets. These names belong to
    the same network as the ports do (containers with --network host included), and vanish with the process, however
    the process ends.
    """
    claim = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":  # no other system has such names, or cards
            claim.bind(f"\0nanochat-hccl-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


class PortBlocks:
    """The blocks of ports that a process holds for its job's collectives, as long as this object lives."""

    def __init__(self) -> None:
        self._held: dict[int, list[socket.socket]] = {}

    def hold(self, base: int) -> int:
        """Hold the block of ports from `base` on.

        Returns 0, or the first port that another process has.
        """
        if base in self._held:
            return 0
        claims: list[socket.socket] = []
        for port in range(base, base + BLOCK):
            claim = _claim(port)
            if claim is not None:
                claims.append(claim)
            if claim is None or port_taken(port):
                _close(claims)
                return port
        self._held[base] = claims
        return 0

    def release(self, base: int) -> None:
        """Let other processes have a block that is held here."""
        _close(self._held.pop(base, []))

    def free(self, first: int = FIRST_BLOCK, hold: bool = False) -> int:
        """Return the first port of a free block; 0 if there is no free block.

        `hold`: the block is held from then on.
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
    """Return why the block of HCCL_IF_BASE_PORT cannot be had, with a free block."""
    free = PortBlocks().free()
    return (
        f"HCCL_IF_BASE_PORT={base} needs ports {base} to {base + BLOCK - 1} for this job's collectives, and port "
        f"{taken_port} is taken by another. Leave it out to have a block chosen, or use "
        f"HCCL_IF_BASE_PORT={free}"
    )
