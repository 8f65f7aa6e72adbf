"""The inside of the sandbox. sandbox.py starts this file with `python -I -S`, so it imports only the standard library.

There are two processes. The supervisor forks the program, enforces the time limit, and kills whatever the program
leaves behind. The program's process first builds its cage (in the `namespaces` tier a root folder with nothing but
Python, read-only, and a small scratch folder, without a network and without a view of other processes), then gives up
its rights, and only then reads the program.
"""

import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

TIMED_OUT = 124
NOT_SET_UP = 125
SCRATCH = 16 << 20  # bytes of the scratch folder, which is in memory
FILE = 1 << 20  # bytes of the largest file that a program may write
NOBODY = 65534

# <linux/sched.h>, <linux/mount.h>, <linux/prctl.h>
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
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
    call("prctl", option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


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


def enter_namespaces() -> None:
    """Leave the host's mounts, processes, network and names. A plain user does so as root of a new user namespace."""
    own = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        try:
            call("unshare", own)
            return
        except OSError:
            pass  # root in a container without CAP_SYS_ADMIN: continue like a plain user
    call("unshare", own | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        Path("/proc/self", name).write_text(text)


def build_root(root: str) -> None:
    """Make `root` a small folder in memory that holds Python, read-only, and move into it irrevocably."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH},mode=755")
    for folder in ("/usr", "/lib", "/lib64", "/lib32", sys.base_prefix, sys.base_exec_prefix):
        inside = root + folder
        if os.path.islink(folder) and not os.path.lexists(inside):
            os.symlink(os.readlink(folder), inside)
        elif os.path.isdir(folder) and not os.path.ismount(inside):
            os.makedirs(inside, exist_ok=True)
            mount(folder, inside, None, MS_BIND | MS_REC)
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where, options = line.split()[4:6]
        where = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), where)  # a space appears as \040
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


def drop_rights() -> None:
    """Become the user nobody if this process is root, and drop all capabilities."""
    if os.getuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        except OSError:
            pass  # a user namespace has no second user; the next lines drop the capabilities
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    call("capset", header, (ctypes.c_uint32 * 6)())


def limit(seconds: float, memory: int) -> None:
    """Set the limits of both tiers. RLIMIT_NPROC of 1 forbids forks and threads, except for root."""
    for what, amount in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_NPROC, 1),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (amount, amount))


def run_program(null: int) -> NoReturn:
    """Read a secret and a program from standard input, run the program, and print the secret after its last line."""
    with open(0, "rb", closefd=False) as given:
        secret, _, program = given.read().partition(b"\n")
    os.dup2(null, 0)
    write, leave = os.write, os._exit  # kept here, because the program may replace them
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})  # running it is the purpose of this file
        sys.stdout.flush()
        write(1, b"\n" + secret + b"\n")
        leave(0)
    except BaseException:  # including SystemExit: a program that leaves early has not passed
        traceback.print_exc()
    finally:
        leave(1)
    raise AssertionError("unreachable")


def kill_orphans() -> None:
    """Kill what the program left behind: as subreaper, this process is the parent of every orphan in any session."""
    me, end = os.getpid(), time.monotonic() + 2
    while time.monotonic() < end:
        for entry in os.listdir("/proc"):
            try:
                # The parent's number is the second word after the name in parentheses.
                if (
                    entry.isdigit()
                    and int(Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()[1]) == me
                ):
                    os.kill(int(entry), signal.SIGKILL)
            except OSError:
                pass  # the process has ended meanwhile
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def wait_for(child: int, seconds: float) -> int:
    """Wait for the program; return its exit code, or kill it after `seconds` and return TIMED_OUT."""
    end = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) & 0xFF
        if time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return TIMED_OUT
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, end - time.monotonic()))


def main(isolated: bool, seconds: float, memory: int, root: str, parent: int) -> None:
    """Supervise one program: fork, build its cage, wait, clean up, and exit with its exit code."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # the parent died before the line above took effect
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    null = os.open("/dev/null", os.O_RDWR)  # opened here, because there is no /dev in the cage
    try:
        if isolated:
            enter_namespaces()
        else:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            if isolated:
                build_root(root)
                drop_rights()
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # after drop_rights: a change of user clears it
            limit(seconds, memory)
            run_program(null)
    except OSError as failure:
        print(failure, flush=True)
        os._exit(NOT_SET_UP)
    code = wait_for(child, seconds)
    if not isolated:
        kill_orphans()
    os._exit(code)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
