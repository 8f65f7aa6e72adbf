"""Supervises and confines one sandboxed program, in processes of its own.

sandbox.py starts this file with `python -I -S`, so it imports only the standard library.

There are two processes. The supervisor forks the program's process, enforces the time limit, and
reports by its exit code whether the program passed. The program's process first confines itself. In
the `namespaces` tier, it gets a root folder with only /usr, /lib and Python (read-only) and a small
scratch folder, no network, and no view of other processes. It then gives up its rights, makes the
kernel refuse the system calls that no program here needs, and only then starts the program. If any
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

# Exit codes of the supervisor.
PASSED = 0
FAILED = 1
TIMED_OUT = 124
NOT_SET_UP = 125
SCRATCH = 16 << 20  # the size of the scratch folder in bytes, which is in memory
FILE = 1 << 20  # the size of the largest file that a program may write, in bytes
NOBODY = 65534

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>
CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# <linux/filter.h>, <linux/seccomp.h>: instructions, verdicts, and offsets in struct seccomp_data
# (little-endian).
LOAD = 0x20
JUMP_IF_EQUAL = 0x15
JUMP_IF_AT_LEAST = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
KILL = 0x80000000
NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
X32 = 1 << 30  # the first number of the x32 calls, a second set of numbers on x86_64

# <linux/landlock.h>
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_RIGHTS = (0, 13, 14, 15, 15)  # rights over files in versions 1 to 4; later ones have 16
LANDLOCK_READ = 1 << 2 | 1 << 3  # files and folders

# In a user namespace, a remount must keep these options of the original mount.
MOUNT_OPTIONS = {
    "nosuid": MS_NOSUID,
    "nodev": MS_NODEV,
    "noexec": MS_NOEXEC,
    "noatime": MS_NOATIME,
    "nodiratime": MS_NODIRATIME,
    "relatime": MS_RELATIME,
}


def call(name: str, *arguments: Any) -> None:
    """Call a C function.

    Raises OSError with the function's name if the function returns anything but 0.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def prctl(option: int, value: int) -> None:
    """Set an attribute of this process with prctl(2)."""
    zero = ctypes.c_ulong(0)
    call("prctl", option, ctypes.c_ulong(value), zero, zero, zero)


def mount(
    source: str,
    target: str,
    kind: str | None,
    flags: int,
    data: str | None = None,
) -> None:
    """Mount a file system with mount(2)."""
    call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends; a change of user undoes this."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def become_nobody() -> None:
    """Become the user nobody permanently; only root can do this."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    die_with_parent()


def enter_namespaces() -> bool:
    """Enter new namespaces, and return whether they include a user namespace.

    They separate the program from the host's mounts, processes, network and host name. In a user
    namespace, the program is root only in name. Its limits are those of the user who created the
    namespace. Limits do not bind the real root, so root becomes nobody before creating one.
    """
    namespaces = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    # This must happen as root, since the user nobody may not be able to enter a parent folder.
    os.chdir(sys.base_prefix)
    if os.getuid() == 0:
        with contextlib.suppress(OSError):
            call("unshare", namespaces)
            return False
        become_nobody()  # root in a container without CAP_SYS_ADMIN
        prctl(PR_SET_DUMPABLE, 1)  # or the files below would belong to root
    uid = os.getuid()
    gid = os.getgid()
    call("unshare", namespaces | CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    return True


def library() -> tuple[str, ...]:
    """Return the folders that Python needs to run, some of which may not exist."""
    return ("/usr", "/lib", "/lib64", "/lib32", sys.base_prefix, sys.base_exec_prefix)


def build_root(root: str) -> None:
    """Make `root` the root folder, with Python's folders (read-only) and /tmp in memory."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH},mode=755")
    for folder in library():
        inside = root + folder
        source = "." if folder == sys.base_prefix else folder  # see chdir() in enter_namespaces()
        if os.path.islink(folder) and not os.path.lexists(inside):
            os.symlink(os.readlink(folder), inside)
        elif os.path.isdir(source) and not os.path.ismount(inside):
            os.makedirs(inside, exist_ok=True)
            mount(source, inside, None, MS_BIND | MS_REC)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        path, options = line.split()[4:6]
        path = re.sub(r"\\([0-7]{3})", _octal_character, path)  # a space appears as \040
        if path.startswith(root + "/"):
            flags = sum(MOUNT_OPTIONS.get(option, 0) for option in options.split(","))
            mount("none", path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | flags)
            if not os.statvfs(path).f_flag & os.ST_RDONLY:
                raise OSError(f"{path} is still writable")
    os.makedirs(root + "/tmp", exist_ok=True)
    os.chmod(root + "/tmp", 0o1777)
    os.chdir(root)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)
    os.chdir("/tmp")


def _octal_character(match: "re.Match[str]") -> str:
    return chr(int(match[1], 8))


def open_library() -> None:
    """Make Python find its library through folders that are already open.

    The user nobody may not be able to enter a parent of these folders, such as /root.
    """
    open_folders = {}
    for folder in sys.path:
        if os.path.isdir(folder):
            descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            open_folders[folder] = f"/proc/self/fd/{descriptor}"
    sys.path[:] = [open_folders.get(folder, folder) for folder in sys.path]
    for module in tuple(sys.modules.values()):
        for i, path in enumerate(getattr(module, "__path__", ())):
            for folder, open_folder in open_folders.items():
                if path.startswith(folder):
                    module.__path__[i] = open_folder + path[len(folder) :]
                    break


def confine(root: str) -> None:
    """Let the program write only below `root`, and read only there and in Python's folders.

    This uses Landlock instead of namespaces. On a kernel without Landlock, such as one before Linux
    5.13, access to files is not restricted.
    """
    if os.getuid() == 0:
        os.chown(root, NOBODY, NOBODY)
        open_library()
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return
    rights_count = LANDLOCK_RIGHTS[version] if version < len(LANDLOCK_RIGHTS) else 16
    all_rights = (1 << rights_count) - 1
    rules = libc.syscall(
        LANDLOCK_CREATE_RULESET, struct.pack("Q", all_rights), ctypes.c_size_t(8), 0
    )
    allowed = {folder: LANDLOCK_READ for folder in library() if os.path.isdir(folder)}
    allowed[root] = all_rights
    for folder, rights in allowed.items():
        descriptor = os.open(folder, os.O_PATH)
        call("syscall", LANDLOCK_ADD_RULE, rules, 1, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
    call("syscall", LANDLOCK_RESTRICT_SELF, rules, 0)
    os.close(rules)


def drop_rights() -> None:
    """Drop all capabilities, and deny unprivileged processes access to this process's memory."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    call("capset", header, (ctypes.c_uint32 * 6)())
    prctl(PR_SET_DUMPABLE, 0)


def refuse_calls(
    architecture: int,
    denied: list[int],
    own_process: list[int],
    zero: list[int],
) -> None:
    """Make the kernel refuse system calls of this process (seccomp).

    Refused are the calls in `denied`, those in `own_process` unless their first argument is the ID
    of this process, those in `zero` unless their first argument is 0, and all x32 calls. Calls of
    another architecture, such as the 32-bit calls of x86, kill the process.
    """
    # An instruction: operation, instructions to skip if true, instructions to skip if false,
    # operand.
    code = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_AT_LEAST, 0, 1, X32),
        (RETURN, 0, 0, REFUSE),
    ]
    for number in denied:
        code += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE)]
    first_arguments = dict.fromkeys(own_process, os.getpid()) | dict.fromkeys(zero, 0)
    for number, first_argument in first_arguments.items():
        code += [
            (JUMP_IF_EQUAL, 0, 4, number),
            (LOAD, 0, 0, FIRST_ARGUMENT),
            (JUMP_IF_EQUAL, 1, 0, first_argument),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    code.append((RETURN, 0, 0, ALLOW))
    instructions = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    filters = ctypes.create_string_buffer(instructions)
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(filters))
    call("prctl", PR_SET_SECCOMP, ctypes.c_ulong(2), program, ctypes.c_ulong(0), ctypes.c_ulong(0))


def limit(seconds: float, memory: int) -> None:
    """Limit this process's CPU time, address space, file size, open files and new processes."""
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: FILE,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
    }
    for name, amount in limits.items():
        resource.setrlimit(name, (amount, amount))


def send_secret() -> None:
    """Send the supervisor a secret, and make libc send it again when this process ends normally.

    At exit, libc calls dprintf(status, secret). The exit status of a program that reached its end
    is 0, which is also the file descriptor of the connection to the supervisor. While the program
    runs, no Python frame or object holds the secret.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.strdup.restype = ctypes.c_void_p
    secret = os.urandom(16).hex().encode()
    os.write(0, secret)
    call("on_exit", libc.dprintf, ctypes.c_void_p(libc.strdup(secret)))


def run_program(program: bytes) -> None:
    """Run a program to its end, or exit with code 1 if it raises an exception."""
    exit_now = os._exit  # taken now, before the program can replace it
    ended = False
    try:
        code = compile(program, "<program>", "exec")
        exec(code, {"__name__": "__main__"})  # running it is the purpose of this file
        ended = True
    except BaseException:  # including SystemExit: a program that leaves early has not passed
        traceback.print_exc()
    finally:
        if not ended:
            exit_now(FAILED)


def wait_for(child: int, seconds: float) -> bool:
    """Wait for process `child`, killing it after `seconds`, and return whether it ended in time."""
    end = time.monotonic() + seconds
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, end - time.monotonic()))
    return True


def supervise(child: int, receiver: socket.socket, seconds: float) -> int:
    """Wait for the program, and return the supervisor's exit code.

    The program has passed if its 32-byte secret has arrived twice, and nothing else has.
    """
    if not wait_for(child, seconds):
        return TIMED_OUT
    message = b""
    while len(message) <= 64:
        received = receiver.recv(65)
        if not received:
            break
        message += received
    if len(message) < 32:
        return NOT_SET_UP
    return PASSED if message[:32] == message[32:] else FAILED


def main(
    isolated: bool,
    seconds: float,
    memory: int,
    root: str,
    parent: int,
    calls: dict[str, Any],
) -> None:
    """Fork into the supervisor and the process of the program, which is read from standard input.

    The supervisor exits with supervise()'s code, or with 125 if it cannot fork or isolate the
    program. The program's process returns only if the program reaches its end.
    """
    die_with_parent()
    if os.getppid() != parent:
        os._exit(FAILED)  # the parent died before the line above took effect
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    with open(0, "rb", closefd=False) as stdin:
        program = stdin.read()
    receiver, sender = socket.socketpair()
    try:
        in_user_namespace = isolated and enter_namespaces()
        # A program of the same user must not reach the supervisor's memory.
        prctl(PR_SET_DUMPABLE, 0)
        child = os.fork()
        if child:
            sender.close()
            receiver.shutdown(socket.SHUT_WR)  # so that the program's standard input is empty
            os._exit(supervise(child, receiver, seconds))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        receiver.close()
        os.dup2(sender.detach(), 0)
        die_with_parent()
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        if isolated:
            build_root(root)
        else:
            confine(root)
        if os.getuid() == 0 and not in_user_namespace:
            become_nobody()
        drop_rights()
        limit(seconds, memory)
        send_secret()
        refuse_calls(**calls)
    except OSError as failure:
        print(failure, flush=True)
        os._exit(NOT_SET_UP)
    run_program(program)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
