"""The inside of the sandbox. sandbox.py starts this file with `python -I -S`, so it imports only the standard library.

There are two processes. The supervisor forks the program, enforces the time limit, and tells by its exit code whether
the program passed. The program's process first builds its cage (in the `namespaces` tier a root folder with nothing but
Python, read-only, and a small scratch folder, without a network and without a view of other processes), then gives up
its rights, lets the kernel refuse the system calls that no program here needs, and only then starts the program. If one
of these steps fails, the program does not start.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PASSED, FAILED, TIMED_OUT, NOT_SET_UP = 0, 1, 124, 125  # exit codes of the supervisor
SCRATCH = 16 << 20  # bytes of the scratch folder, which is in memory
FILE = 1 << 20  # bytes of the largest file that a program may write
NOBODY = 65534

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
)
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = (
    1024,
    2048,
    4096,
    16384,
    1 << 18,
    1 << 21,
)
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
# <linux/filter.h>, <linux/seccomp.h>: load a word, jump if equal, jump if at least, return
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data, little-endian
X32 = 1 << 30  # the first number of the x32 calls, a second set of numbers on x86_64
# <linux/landlock.h>
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_RIGHTS = (
    0,
    13,
    14,
    15,
    15,
)  # rights over files that versions 1 to 4 know; later ones know 16
LANDLOCK_READ = 1 << 2 | 1 << 3  # files and folders
# In a user namespace, a remount must keep these options of the original mount.
KEPT = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}


def call(name: str, *arguments: Any) -> None:
    """Call a C function that returns 0 on success. OSError with the name of the function otherwise."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def prctl(option: int, value: int) -> None:
    """Set a property of this process."""
    call(
        "prctl",
        option,
        ctypes.c_ulong(value),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
        ctypes.c_ulong(0),
    )


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """Call mount(2)."""
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )


def die_with_parent() -> None:
    """Be killed when the parent ends. A change of user forgets this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_nobody() -> None:
    """Become the user nobody for good, which needs root."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    die_with_parent()


def enter_namespaces() -> bool:
    """Leave the host's mounts, processes, network and names. Return whether that took a new user namespace.

    In a user namespace the program is root by name. Its limits are those of the user who made the namespace, and they
    do not bind the kernel's own root, so root becomes nobody first.
    """
    own = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    os.chdir(
        sys.base_prefix
    )  # while this process is still root: nobody may not be able to pass a folder above it
    if os.getuid() == 0:
        with contextlib.suppress(OSError):
            call("unshare", own)
            return False
        become_nobody()  # root in a container without CAP_SYS_ADMIN
        prctl(PR_SET_DUMPABLE, 1)  # or the files below would belong to root
    uid, gid = os.getuid(), os.getgid()
    call("unshare", own | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(text)
    return True


def library() -> tuple[str, ...]:
    """The folders that Python needs."""
    return ("/usr", "/lib", "/lib64", "/lib32", sys.base_prefix, sys.base_exec_prefix)


def build_root(root: str) -> None:
    """Make `root` a small folder in memory that holds Python, read-only, and move into it irrevocably."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH},mode=755")
    for folder in library():
        inside = root + folder
        source = "." if folder == sys.base_prefix else folder  # enter_namespaces() has gone there
        if os.path.islink(folder) and not os.path.lexists(inside):
            os.symlink(os.readlink(folder), inside)
        elif os.path.isdir(source) and not os.path.ismount(inside):
            os.makedirs(inside, exist_ok=True)
            mount(source, inside, None, MS_BIND | MS_REC)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, options = line.split()[4:6]
        where = re.sub(
            r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), where
        )  # a space appears as \040
        if where.startswith(root + "/"):
            kept = sum(KEPT.get(option, 0) for option in options.split(","))
            mount("none", where, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)
            if not os.statvfs(where).f_flag & os.ST_RDONLY:
                raise OSError(f"{where} is still writable")
    os.makedirs(root + "/tmp", exist_ok=True)
    os.chmod(root + "/tmp", 0o1777)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp")


def hold_library() -> None:
    """Reach Python's library through open folders: nobody may not be able to pass a folder above it, such as /root."""
    held = {
        folder: f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}"
        for folder in sys.path
        if os.path.isdir(folder)
    }
    sys.path[:] = [held.get(folder, folder) for folder in sys.path]
    for module in tuple(sys.modules.values()):
        for i, path in enumerate(getattr(module, "__path__", ())):
            module.__path__[i] = next(
                (held[one] + path[len(one) :] for one in held if path.startswith(one)), path
            )


def confine(root: str) -> None:
    """Without namespaces: write only below `root` and read only Python's files, if the kernel has Landlock (5.13)."""
    if os.getuid() == 0:
        os.chown(root, NOBODY, NOBODY)
        hold_library()
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    every = (1 << (LANDLOCK_RIGHTS[version] if version < len(LANDLOCK_RIGHTS) else 16)) - 1
    rules = libc.syscall(LANDLOCK_CREATE_RULESET, struct.pack("Q", every), ctypes.c_size_t(8), 0)
    for folder, rights in (
        (root, every),
        *((folder, LANDLOCK_READ) for folder in library() if os.path.isdir(folder)),
    ):
        inside = os.open(folder, os.O_PATH)
        call("syscall", LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", rights, inside), 0)
        os.close(inside)
    call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def drop_rights() -> None:
    """Drop all capabilities, and close this process to other processes and to its own /proc/self/mem."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    call("capset", header, (ctypes.c_uint32 * 6)())
    prctl(PR_SET_DUMPABLE, 0)


def refuse_calls(architecture: int, denied: list[int], own: list[int], zero: list[int]) -> None:
    """Let the kernel refuse system calls (seccomp): those in `denied`, and unless their first argument is this process
    or 0, those in `own` and `zero`. Calls of another architecture, such as the 32-bit ones of x86, kill the process."""
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in denied:
        code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    for number, only in (
        *((number, os.getpid()) for number in own),
        *((number, 0) for number in zero),
    ):
        code += [
            (EQUAL, 0, 4, number),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (EQUAL, 1, 0, only),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    code.append((RETURN, 0, 0, ALLOW))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters))
    call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), program, ctypes.c_ulong(0), ctypes.c_ulong(0))


def limit(seconds: float, memory: int) -> None:
    """Set the limits of both tiers."""
    for what, amount in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (amount, amount))


def promise() -> None:
    """Tell the supervisor a secret, and leave it to libc to tell it again when this process ends normally.

    At exit, libc calls dprintf(status, secret), and file 0, the exit status of a program that reached its end, leads to
    the supervisor. So the secret is in no frame and no object of Python while the program runs.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.strdup.restype = ctypes.c_void_p
    secret = os.urandom(16).hex().encode()
    os.write(0, secret)
    call("on_exit", libc.dprintf, ctypes.c_void_p(libc.strdup(secret)))


def run_program(program: bytes) -> None:
    """Run a program, and return only if it reached its last line."""
    leave, ended = os._exit, False  # kept here, because the program may replace os._exit
    try:
        exec(
            compile(program, "<program>", "exec"), {"__name__": "__main__"}
        )  # running it is the purpose of this file
        ended = True
    except BaseException:  # including SystemExit: a program that leaves early has not passed
        traceback.print_exc()
    finally:
        if not ended:
            leave(FAILED)


def wait_for(child: int, seconds: float) -> bool:
    """Wait for the program, and return whether it ended by itself; kill it after `seconds`."""
    end = time.monotonic() + seconds
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, end - time.monotonic()))
    return True


def supervise(child: int, told: socket.socket, seconds: float) -> int:
    """Wait for the program, and return the exit code: it passed if its secret arrived a second time, and only that."""
    if not wait_for(child, seconds):
        return TIMED_OUT
    said = b""
    while len(said) <= 64 and (more := told.recv(65)):
        said += more
    if len(said) < 32:
        return NOT_SET_UP
    return PASSED if said[:32] == said[32:] else FAILED


def main(
    isolated: bool, seconds: float, memory: int, root: str, parent: int, calls: dict[str, Any]
) -> None:
    """Fork. The supervisor exits with the verdict; the program's process returns at the program's end."""
    die_with_parent()
    if os.getppid() != parent:
        os._exit(FAILED)  # the parent died before the line above took effect
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    with open(0, "rb", closefd=False) as given:
        program = given.read()
    told, teller = socket.socketpair()
    try:
        renamed = isolated and enter_namespaces()
        prctl(
            PR_SET_DUMPABLE, 0
        )  # a program of the same user must not reach the supervisor's memory
        if child := os.fork():
            teller.close()
            told.shutdown(socket.SHUT_WR)  # so that the program's standard input is empty
            os._exit(supervise(child, told, seconds))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        told.close()
        os.dup2(teller.detach(), 0)
        die_with_parent()
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if isolated:
            build_root(root)
        else:
            confine(root)
        if os.getuid() == 0 and not renamed:
            become_nobody()
        drop_rights()
        limit(seconds, memory)
        promise()
        refuse_calls(**calls)
    except OSError as failure:
        print(failure, flush=True)
        os._exit(NOT_SET_UP)
    run_program(program)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
