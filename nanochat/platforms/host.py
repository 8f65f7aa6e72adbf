"""Functions for the host, which every device depends on.

They cover the host's processor and memory, the compiler's cache, and the launcher's environment
variables, which tell this process its ranks in a job.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from nanochat.common import UserError, tr, warn
from nanochat.data import limits
from nanochat.data.library_words import in_words

MEMORY = Path("/proc/meminfo")
# Folders of other programs' compiled code, which by default lie in the user's own cache.
OTHER_CACHES = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR")
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # identify this process
MEETING = ("MASTER_ADDR", "MASTER_PORT")  # tell where the processes meet


def cpu_flags() -> frozenset[str]:
    """Return the processor's "flags" in /proc/cpuinfo, or an empty set if it lists none."""
    return frozenset(_cpuinfo("flags").split())


def bf16_unit() -> tuple[bool, str]:
    """Return whether the processor multiplies bf16 faster than fp32, and the reason.

    Intel's AVX512-BF16 starts one instruction per cycle instead of fp32's two: on one thread, a
    bf16 matmul reaches 79 GFLOP/s and an fp32 matmul 140 (dev/LOG.md). AMD's is twice as fast as
    fp32. AMX is far faster than both.
    """
    flags = cpu_flags()
    if "amx_bf16" in flags:
        return True, tr("the CPU has amx_bf16")
    if "avx512_bf16" not in flags:
        return False, tr("the CPU has neither AMX nor AVX512-BF16")
    if _cpuinfo("vendor_id") == "GenuineIntel":
        return False, tr("Intel's avx512_bf16 without AMX is slower than fp32")
    return True, tr("the CPU has avx512_bf16")


def cpu_model() -> str:
    """Return the processor's name, or "CPU" if the system does not report it."""
    return _cpuinfo("model name") or "CPU"


def arm_core() -> tuple[str, ...]:
    """Return what /proc/cpuinfo says of a processor of ARM, which has no flags and often no name."""
    keys = ("Features", "CPU implementer", "CPU part", "CPU variant")
    return tuple(_cpuinfo(key) for key in keys)


def compiler() -> str | None:
    """Return the path of $CXX (by default, g++) or else of clang++, or None if neither exists."""
    return shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")


def memory_free() -> int:
    """Return the bytes of memory that a process can still take without making others swap.

    A container's limit counts too. On systems other than Linux, this is half of the
    physical memory.
    """
    try:
        free = 1024 * _number(MEMORY, "MemAvailable:")
    except (OSError, StopIteration):
        # Not Linux: cached pages cannot be distinguished from used ones.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    allowed = limits.memory_left()
    return free if allowed is None else min(free, allowed)


def _number(path: Path, key: str) -> int:
    """Return the number that follows `key` in the first line that starts with `key`.

    Raises StopIteration if no line starts with the key.
    """
    with open(path, encoding="utf-8") as file:
        line = next(line for line in file if line.startswith(key))
    return int(line.split()[1])


def _cpuinfo(key: str) -> str:
    """Return the first value of a key in /proc/cpuinfo, or "" if there is none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith(key):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""


# --- the compiler's cache ------------------------------------------------------------------------


def use_compile_cache(base: Path) -> Path:
    """Set TORCHINDUCTOR_CACHE_DIR to the folder for compiled code, and return the folder.

    It is the first usable one of: the variable's own value, ~/.cache/nanochat/compile_cache (shared
    by all base folders), `base`/compile_cache and a private folder among the temporary files.

    Code in the folder is loaded and run, so a folder that another user could write to is skipped.
    The same holds for the folders that OTHER_CACHES name: their variables are unset with a warning.
    The compiler does not quote its command line, so a path with a space or a quote is skipped too,
    unless the user named it. Call this early: creating the first optimizer imports torch's
    compiler, which then chooses a folder of its own.
    """
    for variable in OTHER_CACHES:
        other = os.environ.get(variable)
        if other and not _is_usable(Path(other), is_named=True):
            del os.environ[variable]
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named and _is_usable(Path(named), is_named=True):
        return Path(named)
    folder = _first_usable_folder(base) or _private_folder()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


def _first_usable_folder(base: Path) -> Path | None:
    places = [base / "compile_cache"]
    with contextlib.suppress(RuntimeError):  # no home
        places.insert(0, Path.home() / ".cache" / "nanochat" / "compile_cache")
    for place in places:
        if plain_path(place) and _is_usable(place):
            return place
    return None


def plain_path(path: Path) -> bool:
    """Return whether a path is a single word in an unquoted command line."""
    try:
        return shlex.split(str(path)) == [str(path)]
    except ValueError:  # a quote without an end
        return False


def _is_usable(folder: Path, is_named: bool = False) -> bool:
    """Create a folder if it is missing, and return whether it can be the compiler's cache.

    Only this user and root may be able to write to it. A folder that the user has named
    (`is_named`) may be read-only. Warns if others can write, or if a named folder cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        why = not_private(folder)
        if not why and not is_named and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)  # files in it may have any mode: a umask of 0 lets others write
    except OSError as failure:
        if not is_named:
            return False
        why = in_words(failure)
    if why:
        warn(tr("compiled code is not loaded from {folder}: {why}", folder=folder, why=why))
        return False
    return is_named or os.access(folder, os.W_OK)


def not_private(folder: Path) -> str:
    """Return why another user could write into a folder or replace it, or "" if none could."""
    about = folder.stat()
    if about.st_uid not in (os.geteuid(), 0):
        return tr(
            "it belongs to user {owner}, and must belong to user {user}, who runs this command",
            owner=about.st_uid,
            user=os.geteuid(),
        )
    if others_write(about):
        command = f"chmod go-w {shlex.quote(str(folder))}"
        return tr(
            "other users may write to it; if you trust what it holds, run `{command}`",
            command=command,
        )
    for parent in {*folder.absolute().parents, *folder.resolve().parents}:
        about = parent.stat()
        can_rename = not about.st_mode & stat.S_ISVTX  # with this bit, others cannot
        if can_rename and others_write(about):
            return tr(
                "other users may write to {parent}; run `chmod go-w {quoted}`",
                parent=parent,
                quoted=shlex.quote(str(parent)),
            )
    return ""


def others_write(about: os.stat_result) -> bool:
    """Return whether users other than the owner may write.

    A group whose ID equals the owner's user ID is assumed to have no other members.
    """
    if about.st_mode & stat.S_IWOTH:
        return True
    return bool(about.st_mode & stat.S_IWGRP) and about.st_gid != about.st_uid


def _private_folder() -> Path:
    """Create or reuse a temporary folder that no other user can write to, and return it."""
    folder = Path(tempfile.gettempdir()) / f"nanochat-compile-cache-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if folder.is_symlink() or not_private(folder):
        return Path(tempfile.mkdtemp(prefix="nanochat-compile-cache-"))
    return folder


def prepare_compiling() -> None:
    """Make torch's compiler reuse what earlier processes compiled, even in other checkouts.

    Compiled files are named by a hash of the compiler's command line, which contains the path of
    torch. A link in the cache gives torch the same path in all checkouts, without the spaces or
    quotes that its real path may have.
    """
    from torch._functorch import config
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch.utils import cpp_extension

    # The loss and attention are autograd functions of our own, which the cache leaves out by
    # default. Including them is safe because their code is part of the key.
    if hasattr(config, "autograd_cache_allow_custom_autograd_functions"):  # from torch 2.9 on
        config.autograd_cache_allow_custom_autograd_functions = True
    link = Path(cache_dir()) / f"torch-{torch.__version__}"
    if not link.exists():  # missing, or its checkout is gone
        fresh = link.with_name(f".{link.name}-{os.getpid()}")
        with contextlib.suppress(OSError):
            link.parent.mkdir(parents=True, exist_ok=True)
            fresh.symlink_to(Path(torch.__file__).parent, target_is_directory=True)
            os.replace(fresh, link)
    if link.exists():
        cpp_extension._TORCH_PATH = str(link)
        cpp_extension.TORCH_LIB_PATH = str(link / "lib")


MADV_DONTNEED = 4
# A part of a shared library, in /proc/PID/smaps, that the process cannot write to. It may have
# written to it before, while the library was loaded. What it wrote is in memory or swapped out.
MAPPING = re.compile(
    r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) r-.p .*\.so[.0-9]*\n"
    r"(?:\w+:.*\n)*?Anonymous: +(?P<own_kb>\d+) kB\n"
    r"(?:\w+:.*\n)*?Swap: +(?P<swapped_kb>\d+) kB$",
    re.MULTILINE,
)


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory, so that the next step can reuse it.

    This applies to blocks of up to 32 MB, the most that glibc allows. By default, malloc maps large
    tensors to fresh, zeroed pages each time and returns the pages, which takes a tenth of a step's
    CPU time in training (dev/LOG.md). Other C libraries are left alone.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        set_option(-3, 32 << 20)  # mmap threshold
        set_option(-1, 1 << 30)  # trim threshold
        set_option(-2, 64 << 20)  # top pad


def bound_primitives() -> None:
    """Bound the primitives that oneDNN keeps, unless the environment does so.

    oneDNN keeps one for every shape of a matrix product, by default 1,024, and one takes 0.1 MB or
    more. Passes that read prompts of chance lengths have ever new shapes. oneDNN reads the variable
    once, at its first product.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def give_freed_memory_back() -> None:
    """Give freed memory back to the system, if the C library can do so (glibc can).

    After compiling, this frees about 0.5 GB, and after 32 chats of a small model about 50 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def unmap_unused_code() -> None:
    """Unmap the pages of shared libraries; those that are used again come back by themselves.

    Importing torch maps 150 MB of libraries for other devices, of which a CPU calls nothing. They
    stay in the system's cache of files, but no longer count as this process's memory. Does nothing
    where there is no /proc.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for mapping in MAPPING.finditer(mappings):
        # A page of this process's own, such as one with relocated addresses, would be lost.
        if mapping["own_kb"] == mapping["swapped_kb"] == "0":
            start = int(mapping["start"], 16)
            madvise(start, int(mapping["end"], 16) - start, MADV_DONTNEED)


# --- the launcher's variables --------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The ranks of this process in its job, which by default has no other process."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    meets: bool = False  # whether the launcher named a place where the processes meet


def read_ranks(met: bool, environ: Mapping[str, str] = os.environ) -> Ranks:
    """Return this process's ranks in its job, read from the launcher's environment variables.

    An empty variable counts as unset. If RANK, LOCAL_RANK and WORLD_SIZE are unset, the process is
    alone. If `met`, the process group already exists, so no address is needed. Raises UserError
    (exit code 2) if a job of several processes lacks a variable, or if one is invalid, because a
    process that guessed would wait for the others forever, or train alone.
    """
    variables = {
        "RANK": environ.get("RANK", ""),
        "LOCAL_RANK": environ.get("LOCAL_RANK", ""),
        "WORLD_SIZE": environ.get("WORLD_SIZE", ""),
        "LOCAL_WORLD_SIZE": environ.get("LOCAL_WORLD_SIZE", ""),
        "MASTER_ADDR": environ.get("MASTER_ADDR", ""),
        "MASTER_PORT": environ.get("MASTER_PORT", ""),
    }
    if not any(variables[name] for name in PLACE):
        return Ranks()
    meets = all(variables[name] for name in MEETING)
    if variables["WORLD_SIZE"] == "1":
        return Ranks(
            _number_in(variables, "RANK", 0, 0),
            _number_in(variables, "LOCAL_RANK", 0, 0),
            1,
            meets and variables["RANK"] != "",
        )
    needed = PLACE if met else (*PLACE, *MEETING)
    missing = [name for name in needed if not variables[name]]
    if missing:
        present = [name for name in PLACE if variables[name]]
        settings = ", ".join(f"{name}={variables[name]}" for name in present)
        raise UserError(
            tr(
                "{settings}: this process is part of a job of several, but {missing} must be "
                "set too. Start the job with torchrun or python -m nanochat.runtime.launch, "
                "which set them all; to run one process alone: unset {present}",
                settings=settings,
                missing=", ".join(missing),
                present=" ".join(present),
            ),
            exit_code=2,
        )
    world_size = _number_in(variables, "WORLD_SIZE", 1)
    local_size = _number_in(variables, "LOCAL_WORLD_SIZE", 1, world_size) or world_size
    if not met:
        _number_in(variables, "MASTER_PORT", 1, 65_535)
    rank = _number_in(variables, "RANK", 0, world_size - 1)
    local_rank = _number_in(variables, "LOCAL_RANK", 0, local_size - 1)
    return Ranks(rank, local_rank, world_size, meets)


def _number_in(
    variables: Mapping[str, str],
    name: str,
    smallest: int,
    largest: int | None = None,
) -> int:
    """Return the value of the variable `name` as an integer, or 0 if it is empty.

    `variables` must contain `name`, with "" for a variable that is not set. Raises UserError (exit
    code 2) if the value is not a whole number from `smallest` to `largest`.
    """
    word = variables[name]
    if not word:
        return 0
    if word.isdecimal():
        number = int(word)
        if smallest <= number and (largest is None or number <= largest):
            return number
    if largest is None:
        rule = tr("at least {smallest}", smallest=smallest)
    else:
        rule = tr("from {smallest} to {largest}", smallest=smallest, largest=largest)
    raise UserError(
        tr(
            "{name} must be a number {rule}, got {word!r}. torchrun and python -m "
            "nanochat.runtime.launch set it; to run one process alone: unset {place}",
            name=name,
            rule=rule,
            word=word,
            place=" ".join(PLACE),
        ),
        exit_code=2,
    )
