"""Compiles the C++ device once for each version of its source, torch and Python, and keeps it outside the repository.

Each file's object is kept as well, so that after an edit, or a mistake in it, only that file is compiled again.

The compiler is called directly, because torch.utils.cpp_extension would need ninja, and nothing else here does.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "csrc"
NAME = "emulated_npu_device"


def missing() -> str:
    """Why the device cannot be compiled here, or "" if it can."""
    if shutil.which(_compiler()) is None:
        return f"no C++ compiler ({_compiler()}) was found; install g++"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "Python's headers were not found; install python3-dev"
    return ""


def library() -> Path:
    """The compiled device; compile it if it is missing. RuntimeError with the compiler's output if that fails."""
    if why := missing():
        raise RuntimeError(f"the emulated NPU cannot be compiled: {why}")
    folder = _cache() / _fingerprint()
    made = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:  # several test processes may compile at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            print(
                "compiling the emulated NPU, once for each version of it: a few minutes ...",
                file=sys.stderr,
                flush=True,
            )
            _compile(folder, made)
    return made


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _cache() -> Path:
    return Path(os.environ.get("NANOCHAT_EMULATED_NPU_CACHE") or Path.home() / ".cache" / "nanochat-emulated-npu")


def _files() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def _fingerprint(sources: list[Path] | None = None) -> str:
    """Names what some sources (default: all) are compiled to."""
    content = b"".join(path.read_bytes() for path in [*sorted(SOURCES.glob("*.h")), *(sources or _files())])
    words = " ".join([version("torch"), sys.version, _compiler(), *_flags()])
    return hashlib.sha256(content + words.encode()).hexdigest()[:16]


def _flags() -> list[str]:
    # -O1 compiles twice as fast as -O2, and tests spend their time in torch's own kernels anyway
    return ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]


def _compile(folder: Path, made: Path) -> None:
    import torch

    home = Path(torch.__file__).parent
    include = [home / "include", home / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    flags = [*_flags(), *(f"-I{path}" for path in include)]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI"):  # an older pybind11 separates modules of different builds
        if value := getattr(torch._C, f"_PYBIND11_{name}", None):
            flags.append(f'-DPYBIND11_{name}="{value}"')

    targets = {source: folder.parent / "objects" / f"{source.stem}-{_fingerprint([source])}.o" for source in _files()}
    common = folder / "common.h"
    if sum(not target.exists() for target in targets.values()) > 3:  # most of a file's time is spent on torch's headers
        common.write_text("#include <npu.h>\n#include <torch/library.h>\n", encoding="utf-8")
        flags.append(f"-I{SOURCES}")
        _call([_compiler(), *flags, "-x", "c++-header", str(common), "-o", f"{common}.gch"])
        flags += ["-include", str(common)]

    def compile_one(source: Path) -> Path:
        target = targets[source]
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            unfinished = target.with_suffix(f".{os.getpid()}")
            _call([_compiler(), *flags, "-c", str(source), "-o", str(unfinished)])
            unfinished.rename(target)
        return target

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        objects = list(pool.map(compile_one, targets))
    Path(f"{common}.gch").unlink(missing_ok=True)  # 400 MB
    libraries = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10", f"-Wl,-rpath,{home / 'lib'}"]
    unfinished = made.with_suffix(".unfinished")
    _call([_compiler(), "-shared", "-o", str(unfinished), *map(str, objects), *libraries])
    unfinished.rename(made)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling the emulated NPU failed: {' '.join(command)}\n{done.stderr}")
