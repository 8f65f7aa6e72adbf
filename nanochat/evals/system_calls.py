"""Lists the system calls that a sandboxed program may not make, for x86_64 and aarch64."""

import platform
from collections.abc import Mapping
from typing import Any

from nanochat.common import UserError, tr

# Machine -> the column of the tables below, and its AUDIT_ARCH_* of <linux/audit.h>.
ARCHITECTURES = {
    "x86_64": (0, 0xC000003E),
    "aarch64": (1, 0xC00000B7),
}

# Calls that are refused with EPERM. The number is None if an architecture does not have the call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes: none can be made, entered, watched or signalled
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    # memory that no limit counts, and objects that outlive the program
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # the keys of the session, and the network: no socket of any kind (socketpair stays, for
    # asyncio)
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "socket": (41, 198),
    # large and rarely used parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "personality": (135, 92),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # mounts, namespaces and the machine
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
}
# Calls that are allowed only for the program itself: their first argument must be its own process
# ID (OWN), or 0 (ZERO) if 0 means the process itself and not its group.
OWN = {"kill": (62, 129), "tgkill": (234, 131)}
ZERO = {"prlimit64": (302, 261)}


def filter_for(machine: str = platform.machine()) -> Mapping[str, Any]:
    """Return a machine's system-call filter, as the arguments of sandbox_child.refuse_calls().

    They are the architecture and the numbers of three groups of calls: those to deny, those whose
    first argument must be the program's own process ID, and those whose first argument must be 0.
    Raises UserError if this file does not list the machine's calls.
    """
    if machine not in ARCHITECTURES:
        raise UserError(
            tr(
                "running model-written code needs the numbers of the system calls of "
                "{machine}, and only those of {architectures} are known: leave HumanEval "
                "out on this machine",
                machine=machine,
                architectures=", ".join(ARCHITECTURES),
            )
        )
    column, architecture = ARCHITECTURES[machine]
    denied = [numbers[column] for numbers in DENIED.values() if numbers[column] is not None]
    return {
        "architecture": architecture,
        "denied": denied,
        "own_process": [numbers[column] for numbers in OWN.values()],
        "zero": [numbers[column] for numbers in ZERO.values()],
    }
