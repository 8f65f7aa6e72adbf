"""Faults of model-written programs: what a program in the sandbox tries against the machine, and that it gets nowhere.

Each docstring says what a test injects and what must follow.
"""

import contextlib
import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.evals import sandbox
from nanochat.evals.system_calls import ARCHITECTURES, DENIED, filter_for
from tests.support.sandboxes import CROSSED, KINDS, Run, sandboxed

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the sandbox is for Linux")
COLUMN = ARCHITECTURES.get(platform.machine(), (0, 0))[0]
# A program's own view: system calls by name, with their error, and the paths that it must not write.
CALLS = f"""
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
numbers = { {name: numbers[COLUMN] for name, numbers in DENIED.items()} }
def call(name, *arguments):
    result = libc.syscall(numbers[name], *arguments)
    return errno.errorcode[ctypes.get_errno()] if result == -1 else result
"""


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from sandboxed(request.param, monkeypatch)


@pytest.fixture(params=CROSSED)
def run_in_either_tier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield from sandboxed(request.param, monkeypatch)


def named(name: str) -> list[int]:
    """The process numbers of running processes that gave themselves this name."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
    return found


# --- T40 to T42: rights ---------------------------------------------------------------------------


def test_a_program_gets_no_second_process_and_leaves_no_orphan(run: Run) -> None:
    """T40. Injects: programs that fork 300 times, fork twice into new sessions, start threads, or replace themselves by
    a shell, in both tiers of the sandbox, started by root and by a plain user. Must follow: not one fork, thread or
    shell starts, and no process is left.

    注入：在沙箱的两个等级里，分别由 root 和普通用户启动程序，让它 fork 300 次、两次 fork 进入新会话、启动线程、
    把自己换成 shell。必须：没有一次 fork、一个线程或一个 shell 能启动，也不留下任何进程。
    """
    name = f"nx{os.getpid()}"
    outcome = run(
        f"""
        import ctypes, os, threading, time
        ctypes.CDLL(None).prctl(15, b"{name}")
        started = 0
        for i in range(300):
            try:
                child = os.fork()
            except OSError:
                continue
            if child == 0:
                os.setsid()
                os.fork()
                time.sleep(60)
            started += 1
        try:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            started += 1
        except RuntimeError:
            pass
        try:
            os.execv("/bin/sh", ["sh", "-c", "exit 0"])
        except OSError:
            pass
        print(started, "started")
        """,
        seconds=10,
    )
    assert outcome.output == "0 started\n" and outcome.passed
    assert named(name) == []


def test_a_program_has_no_rights_and_writes_nothing_outside_its_folder(run: Run, tmp_path: Path) -> None:
    """T41. Injects: programs that count their capabilities and write to /etc, /root, /tmp, /dev/shm, the folder above
    their own and a folder that everybody may write to, in both tiers, started by root and by a plain user. Must follow:
    the program is not root, has no capability and cannot regain one; writes to its own folder succeed, and all other
    writes fail.

    注入：在两个等级里，分别由 root 和普通用户启动程序，让它数自己的 capability，并向 /etc、/root、/tmp、/dev/shm、
    上一级目录和一个人人可写的目录写文件。必须：程序不是 root，没有任何 capability，也拿不回来；每次写入都失败，
    而在自己的目录里可以写。
    """
    shared = Path("/tmp", f"nanochat-test-{os.getpid()}")
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    try:
        outcome = run(
            f"""
            import ctypes, os
            libc = ctypes.CDLL(None)
            header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            assert libc.capget(header, held) == 0 and not any(held), list(held)
            assert libc.prctl(39, 0, 0, 0, 0) == 1  # no new privileges
            for call in (os.setuid, os.setgid, lambda id: os.setgroups([id])):
                try:
                    call(1)
                except OSError:
                    continue
                raise AssertionError(call)
            open("own", "w").write("a")
            others = ["/etc", "/root"]
            if libc.syscall(444, None, 0, 1) > 0:  # Landlock also closes the folders that everybody may write to
                others += ["/dev/shm", "/tmp", "..", {str(shared)!r}]
            caged = not os.path.exists("/etc/passwd")  # all else is its own scratch space in memory
            for folder in ("/usr", "/lib", *(() if caged else others)):
                for path in (f"{{folder}}/nanochat-{os.getpid()}", folder + "/passwd"):
                    try:
                        open(path, "ab").close()
                    except OSError:
                        continue
                    raise AssertionError(path)
            """
        )
        assert outcome.passed, outcome.output
        assert not list(shared.iterdir())
    finally:
        shutil.rmtree(shared)
    assert not [path for path in ("/tmp", "/root", "/dev/shm") if os.path.exists(f"{path}/nanochat-{os.getpid()}")]


@pytest.mark.parametrize("start", ["python", "setpriv"])
def test_a_program_that_would_keep_its_rights_does_not_start(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """T42. Injects: --unsafe-exec on a machine without namespaces where root may not become another user, and a kernel
    that refuses the filter of system calls. Must follow: the evaluation is refused with the reason, and the program
    does not start.

    注入：在没有命名空间的机器上用 --unsafe-exec，而 root 不能变成别的用户；以及内核拒绝过滤系统调用。
    必须：说明原因并拒绝，程序不启动。
    """
    monkeypatch.setattr(sandbox, "_no_namespaces", lambda: "switched off by a test")
    real = sandbox.subprocess.Popen
    if start == "setpriv":
        if os.getuid() != 0 or not shutil.which("setpriv"):
            pytest.skip("needs root and setpriv")
        before, reason = ["setpriv", "--bounding-set=-setuid,-setgid", "--inh-caps=-setuid,-setgid"], "not permitted"
        monkeypatch.setattr(sandbox.subprocess, "Popen", lambda command, **rest: real([*before, *command], **rest))
    else:
        too_long = {**filter_for(), "denied": [1] * 5000}
        monkeypatch.setattr(sandbox, "filter_for", lambda: too_long)
        reason = "Invalid argument"
    sandbox.tier.cache_clear()
    with pytest.raises(UserError, match=f"even with --unsafe-exec.*{reason}"):
        sandbox.run_program("print('started')", unsafe_exec=True)
    sandbox.tier.cache_clear()


# --- T43 to T45: the kernel -----------------------------------------------------------------------


def test_shared_memory_does_not_pass_the_limits(run: Run) -> None:
    """T43. Injects: programs that ask for SysV shared memory, semaphores and message queues, POSIX message queues and
    anonymous files, 1 GB in all. Must follow: each call is refused, and none of these objects is left on the machine.

    注入：程序申请 SysV 共享内存、信号量和消息队列，POSIX 消息队列，以及匿名文件，共 1 GB。必须：每次调用都被拒绝，
    机器上什么也不留下。
    """

    def segments() -> list[list[str]]:
        return [line.split()[:2] for path in Path("/proc/sysvipc").glob("*") for line in path.read_text().splitlines()]

    before = segments()
    outcome = run(
        CALLS
        + """
key = 0x6e616e6f
print(call("shmget", 0, 1 << 30, 0o1600), call("semget", key, 1, 0o1600), call("msgget", key, 0o1600),
      call("mq_open", b"nano", 0o102, 0o600, None), call("memfd_create", b"nano", 0))
"""
    )
    assert outcome.output == "EPERM EPERM EPERM EPERM EPERM\n" and outcome.passed
    assert segments() == before


def test_the_keys_of_the_session_cannot_be_read(run: Run) -> None:
    """T44. Injects: a key in the session keyring of the process that starts the sandbox, and programs that search for
    the key, read it by its number, and add a key of their own. Must follow: every attempt is refused.

    注入：启动沙箱的进程在会话密钥环里有一把密钥，程序按名字查找它、按编号读取它，并添加自己的密钥。必须：每次尝试都被拒绝。
    """
    libc = ctypes.CDLL(None, use_errno=True)
    add, control = (DENIED[name][COLUMN] for name in ("add_key", "keyctl"))
    key = libc.syscall(add, b"user", b"nanochat-test", b"secret", ctypes.c_size_t(6), -3)
    if key == -1:
        pytest.skip(f"no keys here: {os.strerror(ctypes.get_errno())}")
    libc.syscall(control, 5, key, 0x3F3F3F3F)  # everybody may use it
    try:
        outcome = run(
            CALLS
            + f"""
text = ctypes.create_string_buffer(64)
print(call("request_key", b"user", b"nanochat-test", None, -3), call("keyctl", 11, {key}, text, 64), text.value,
      call("keyctl", 10, -3, b"user", b"nanochat-test"), call("add_key", b"user", b"mine", b"x", 1, -3))
"""
        )
    finally:
        libc.syscall(control, 9, key, -3)
    assert outcome.output == "EPERM EPERM b'' EPERM EPERM\n" and outcome.passed


def test_the_rest_of_the_kernel_is_closed(run: Run) -> None:
    """T45. Injects: programs that call io_uring, userfaultfd, bpf, perf, ptrace, mount and unshare, open vsock,
    netlink, crypto, packet and internet sockets, and make calls by the numbers of x32 and of 32-bit x86. Must follow:
    every call is refused, and a 32-bit call ends the program.

    注入：程序调用 io_uring、userfaultfd、bpf、perf、ptrace、mount 和 unshare，打开 vsock、netlink、crypto、packet
    和互联网套接字，并用 x32 和 32 位 x86 的编号发起调用。必须：每次调用都被拒绝，32 位调用则使程序结束。
    """
    outcome = run(
        CALLS
        + """
import socket
for name in numbers:
    if numbers[name] is not None and name not in ("fork", "vfork", "clone"):
        assert call(name, 0, 0, 0, 0, 0, 0) == "EPERM", name
for family in (1, 2, 10, 16, 17, 38, 40):
    try:
        socket.socket(family, socket.SOCK_RAW if family == 17 else socket.SOCK_DGRAM)
    except PermissionError:
        continue
    raise AssertionError(family)
socket.socketpair()
"""
    )
    assert outcome.passed, outcome.output
    if platform.machine() == "x86_64":
        foreign = run(
            """
            import ctypes, mmap
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.syscall((1 << 30) + 39) == -1 and ctypes.get_errno() == 1  # getpid of x32
            page = mmap.mmap(-1, 4096, prot=7)
            page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20; int 0x80; ret: getpid of 32-bit x86
            print("calling", flush=True)
            ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
            """
        )
        assert foreign.output == "calling\n" and not foreign.passed


# --- T46, T47: the verdict ------------------------------------------------------------------------


def test_other_processes_cannot_be_signalled_or_read(run: Run) -> None:
    """T46. Injects: programs that signal their supervisor, the process that started it and all processes (with signal
    0, which only asks for permission), read their limits and open their memory. Must follow: every attempt fails, and
    the evaluation gets its verdict.

    注入：程序向监督进程、启动它的进程和所有进程发信号（信号 0，只检验权限），读取它们的资源上限，
    并打开它们的内存。必须：每次尝试都失败，评测照常得到结论。
    """
    outcome = run(
        f"""
        import os, resource
        for victim in {{os.getppid(), {os.getpid()}, -1, -{os.getpid()}}} - {{0}}:  # 0: outside of its namespace
            for attempt in (
                lambda: os.kill(victim, 0),
                lambda: os.killpg(0, 0),
                lambda: resource.prlimit(victim, resource.RLIMIT_NOFILE),
                lambda: open(f"/proc/{{victim}}/mem", "rb"),
                lambda: open(f"/proc/{{victim}}/environ", "rb").read(),
                lambda: open("/proc/self/mem", "r+b"),
            ):
                try:
                    attempt()
                except (OSError, ValueError):
                    continue
                raise AssertionError(victim)
        os.kill(os.getpid(), 0)
        """
    )
    assert outcome.passed, outcome.output


CHEATS = {
    "frames": """
        import gc, os, sys
        found, frame = [], sys._getframe()
        while frame:
            found += [frame.f_locals, frame.f_globals, frame.f_code.co_consts]
            frame = frame.f_back
        values = {value for thing in [*found, *gc.get_objects()] for value in [thing, *gc.get_referents(thing)]
                  if isinstance(value, (bytes, str)) and len(value) in (16, 32, 64)}
        for fd in range(32):
            for value in values:
                try:
                    os.set_blocking(fd, False)
                    os.write(fd, value if isinstance(value, bytes) else value.encode())
                except OSError:
                    pass
        """,
    "files": """
        import os
        for fd in range(32):
            for path in (f"/proc/self/fd/{fd}", f"/dev/fd/{fd}"):
                try:
                    held = os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 999)
                    os.write(fd, held)
                    os.write(0, held)
                except OSError:
                    pass
            try:
                os.write(fd, b"passed\\n0\\n")
            except OSError:
                pass
        """,
    "functions": """
        import sys
        frame = sys._getframe()
        while frame:
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                if getattr(value, "__name__", "") in ("promise", "leave", "_exit"):
                    try:
                        value(0)
                    except TypeError:
                        value()
            frame = frame.f_back
        """,
    "atexit": """
        import atexit, os
        atexit.register(os._exit, 0)
        atexit._run_exitfuncs()
        """,
    "exit": """
        import builtins, sys, traceback
        traceback.print_exc = sys.exit
        builtins.SystemExit = builtins.BaseException = KeyError
        sys.exit(0)
        """,
}


def test_what_the_page_admits_is_true(run_in_either_tier: Run) -> None:
    """If this fails, the sandbox has become better than T47 claims."""
    assert run_in_either_tier("import ctypes\nctypes.CDLL(None).exit(0)\n").passed


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_pass_cannot_be_read_and_repeated(run_in_either_tier: Run, cheat: str) -> None:
    """T47. Injects: programs that look for the proof of a pass in frames, in all objects, in open files and in the
    functions around them, write what they find to every open file, and leave early with status 0, all in plain Python.
    Must follow: no program passes. A program that calls exit() of the C library, or whose objects equal everything, can
    pass: it shares a process with its tests.

    注入：程序只用 Python，在栈帧、所有对象、打开的文件和外层函数里寻找“通过”的凭据，把找到的写进每个打开的文件，
    然后以状态 0 提前退出。必须：没有一个算通过。但调用 C 库的 exit()、或造出与一切相等的对象的程序可能算通过，因为它
    与测试代码在同一个进程里。
    """
    outcome = run_in_either_tier(CHEATS[cheat].replace("\n        ", "\n") + "\nimport os\nos._exit(0)\n")
    assert not outcome.passed, outcome.output[:2000]
