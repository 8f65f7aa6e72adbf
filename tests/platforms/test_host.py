"""The compiler's cache, and freed memory of the host's C library."""

import ctypes
import mmap
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from nanochat.data import limits
from nanochat.platforms import host
from nanochat.platforms.cpu.platform import Cpu

ROOT = Path(__file__).resolve().parent.parent.parent

STEP = """
import ctypes, sys
import torch
from nanochat.platforms import host

class Held(ctypes.Structure):  # glibc's struct mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free top".split()]

if sys.argv[1] == "keep":
    host.keep_freed_memory()
ask = ctypes.CDLL(None).mallinfo2
ask.restype = Held
before = ask().mapped
saved = torch.empty(28 << 20, dtype=torch.uint8)
print((ask().mapped - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc, or one before 2.33")
@pytest.mark.parametrize(("how", "mapped"), [("give", 28), ("keep", 0)])
def test_large_tensors_come_from_memory_that_stays_when_they_are_freed(how: str, mapped: int) -> None:
    done = subprocess.run([sys.executable, "-c", STEP, how], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mapped, "MB mapped from fresh pages"


def test_primitives_are_bounded_unless_the_environment_does_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "9")
    host.bound_primitives()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "9"
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    host.bound_primitives()
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can")
def test_it_gives_freed_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()

    blocks = [b"x" * 2**14 for _ in range(4096)]  # 64 MB in blocks too small to be mapped by themselves
    del blocks[:-1]  # the last one keeps the heap from shrinking by itself
    before = resident()
    host.give_freed_memory_back()
    assert before - resident() > 2**25


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_unmapped_code_comes_back_and_pages_of_its_own_stay(tmp_path: Path) -> None:
    def resident_of_files() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * resource.getpagesize()

    library = tmp_path / "relocated.so"
    library.write_bytes(bytes(resource.getpagesize()))
    with library.open("rb") as file:
        page = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page[0] = 1
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    assert ctypes.CDLL(None).mprotect(address, len(page), mmap.PROT_READ) == 0
    before = resident_of_files()
    host.unmap_unused_code()
    assert resident_of_files() < before / 2
    assert page[0] == 1 and torch.ones(3).softmax(0).sum() == 1
    assert ctypes.CDLL(None).madvise(address, len(page), 21) == 0  # MADV_PAGEOUT, to swap if there is any
    host.unmap_unused_code()
    assert page[0] == 1


# --- the compiler's cache ------------------------------------------------------------------------


@pytest.fixture
def no_cache_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")


@pytest.mark.usefixtures("no_cache_named")
def test_without_a_home_the_cache_lies_in_the_base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))  # no folder can be made in it
    assert host.use_compile_cache(tmp_path / "base") == tmp_path / "base" / "compile_cache"


@pytest.mark.usefixtures("no_cache_named")
@pytest.mark.parametrize("name", ["my files", "it's", 'a"b', "back\\slash"])
def test_a_path_that_the_compiler_cannot_take_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / name))
    assert host.use_compile_cache(tmp_path / "base") == tmp_path / "base" / "compile_cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = host.use_compile_cache(tmp_path / name / "base")
    assert private.parent == tmp_path and private.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    assert host.use_compile_cache(tmp_path / name / "base") == private, "the next run finds what this one compiled"
    private.chmod(0o777)  # another user may have put code there
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    assert host.use_compile_cache(tmp_path / name / "base") != private


@pytest.fixture
def only_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache in a base folder, without a home; temporary files lie in tmp_path."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "base" / "compile_cache"


@pytest.mark.usefixtures("no_cache_named")
@pytest.mark.parametrize("layout", ["shared", "shared by a group", "another user's", "in a shared folder"])
def test_a_cache_that_others_may_write_is_passed_over_and_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    only_base: Path,
    capsys: pytest.CaptureFixture[str],
    layout: str,
) -> None:
    only_base.mkdir(parents=True, mode=0o700)
    if layout == "shared":
        only_base.chmod(0o777)
    elif layout == "shared by a group":
        only_base.chmod(0o770)
        os.chown(only_base, -1, other_group())
    elif layout == "in a shared folder":
        only_base.parent.chmod(0o777)
    elif os.getuid() == 0:
        os.chown(only_base, 12_345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    for named in ("", str(only_base)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
        cache = host.use_compile_cache(tmp_path / "base")
        assert cache != only_base and cache.stat().st_mode & 0o777 == 0o700
        assert str(only_base) in capsys.readouterr().err


def other_group() -> int:
    """A group that this user may give a file to, and that is not the user's own."""
    groups = [group for group in os.getgroups() if group != os.getuid()]
    if not groups and os.getuid():
        pytest.skip("this user is in no other group")
    return groups[0] if groups else 1


@pytest.mark.usefixtures("no_cache_named")
def test_a_cache_of_ones_own_is_made_private_and_used(tmp_path: Path, only_base: Path) -> None:
    only_base.parent.mkdir(exist_ok=True)
    before = os.umask(0)
    try:
        assert host.use_compile_cache(tmp_path / "base") == only_base
    finally:
        os.umask(before)
    assert only_base.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("no_cache_named")
def test_a_private_cache_is_closed_to_others_whatever_the_mode_of_its_files(tmp_path: Path, only_base: Path) -> None:
    only_base.mkdir(parents=True, mode=0o755)
    assert host.use_compile_cache(tmp_path / "base") == only_base
    assert only_base.stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("no_cache_named", "only_base")
@pytest.mark.parametrize("variable", host.OTHER_CACHES)
def test_caches_of_other_compilers_that_others_may_write_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    for folder, mode in ((own, 0o700), (shared, 0o777)):
        folder.mkdir()
        folder.chmod(mode)
    monkeypatch.setenv(variable, str(own))
    host.use_compile_cache(tmp_path / "base")
    assert os.environ[variable] == str(own)
    monkeypatch.setenv(variable, str(shared))
    host.use_compile_cache(tmp_path / "base")
    assert variable not in os.environ and str(shared) in capsys.readouterr().err


COMPILES = """
import sys
import torch
from nanochat import device
from nanochat.gpt import GPT, GPTConfig
from nanochat.train.compile import compiled

model = GPT(GPTConfig(sequence_len=32, vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=32, window_pattern="L"))
model.init_weights()
compute = device.compute_init("cpu")
compiled(model, True, (2, 32), compute, model.compile_groups())
print(torch.__file__)
"""


@pytest.mark.slow
def test_what_one_checkout_compiled_another_uses_whatever_their_paths(tmp_path: Path) -> None:
    """The first has a quote and a space in its path, the second has not."""
    if why := Cpu().compiler_missing():
        pytest.skip(why)
    said, libraries, cache = [], [], tmp_path / "cache"
    for name in ("it's my copy", "another"):
        packages = tmp_path / name / "packages"
        packages.parent.mkdir()
        packages.symlink_to(Path(torch.__file__).parent.parent, target_is_directory=True)
        environment = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT}", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
        done = subprocess.run(
            [sys.executable, "-c", COMPILES], env=environment, capture_output=True, text=True, cwd=cache.parent
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert str(packages) in done.stdout
        said.append(done.stdout)
        libraries.append(sorted(cache.rglob("*.so")))
    assert libraries[0] and libraries[0] == libraries[1]
    assert "compiling for the first time" in said[0] and "compiling from the cache" in said[1]
    assert "from the cache" not in said[0] and said[1].rstrip().splitlines()[-2].endswith(" s, from the cache")


def test_free_memory_is_the_hosts_within_the_containers_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 8 GB are free on the host; the container may take 2 GB, and of the 1.5 GB it has, 1 GB is cache."""
    monkeypatch.setattr(host, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "groups")
    assert host.memory_free() > 0  # not Linux
    (tmp_path / "meminfo").write_text("MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n")
    assert host.memory_free() == 8_000_000 * 1024
    (tmp_path / "memory.current").write_text("1500000000\n")
    (tmp_path / "memory.stat").write_text("anon 500000000\ninactive_file 1000000000\n")
    for limit, free in (("max\n", 8_000_000 * 1024), ("2000000000\n", 1_500_000_000), ("100\n", 0)):
        (tmp_path / "memory.max").write_text(limit)
        assert host.memory_free() == free
