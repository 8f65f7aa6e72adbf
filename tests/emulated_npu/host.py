"""The fake host of an emulated NPU: a root folder with driver, CANN, device files and npu-smi, and its environment."""

import json
import os
import platform
import signal
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from . import build, smi
from .chips import CHIPS, GIB

STUB = Path(__file__).resolve().parent / "stub"
DRIVER = "25.0.rc1.1"
CANN = {(2, 13): "9.1.0", (2, 12): "9.1.0", (2, 11): "9.1.0"}  # by version of torch
OLDER_CANN = "8.3.RC1"  # for older versions of torch

SET_ENV = """export ASCEND_TOOLKIT_HOME={home}
export ASCEND_HOME_PATH={home}
export ASCEND_OPP_PATH={home}/opp
export LD_LIBRARY_PATH={home}/lib64${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}
"""


@dataclass(frozen=True)
class Settings:
    """The choices of the emulator's command line."""

    chip: str = "910B3"
    devices: int = 1
    memory_gib: float | None = None  # None: the chip's own memory
    strict: bool = True
    deferred: bool = True


def environment(root: Path, settings: Settings) -> dict[str, str]:
    """Make the host under `root`, and return the environment in which a program finds the host and the stub package."""
    chip = asdict(CHIPS[settings.chip])
    if settings.memory_gib is not None:
        chip["memory"] = int(settings.memory_gib * GIB)
    torch_version = version("torch").split("+")[0]
    home = _install(root, torch_version)
    for name in ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{i}" for i in range(settings.devices))):
        _write(root / "dev" / name, "")
    if chip["soc"] >= 260:  # what HCCL reads on an Ascend 950 server
        for name in ("ummu", "uburma"):
            _write(root / "dev" / name, "")
        topology = "/usr/local/Ascend/driver/topo/links.json"
        _write(root / topology[1:], "{}")
        _write(root / "etc/hccl_rootinfo.json", json.dumps({"version": "2.0", "topo_file_path": topology}))
    smi.install(root / "usr/local/bin", chip, settings.devices, DRIVER)
    said = {
        "library": str(build.library()), "chip": chip, "devices": settings.devices, "strict": settings.strict,
        "deferred": settings.deferred, "torch": torch_version,
    }  # fmt: skip
    driver = root / "usr/local/Ascend/driver/lib64"
    inherited = dict(os.environ)
    inherited.pop("NANOCHAT_DEVICE", None)
    return {
        **inherited,
        "NANOCHAT_EMULATED_NPU": json.dumps(said),
        "PYTHONPATH": _joined([STUB, root / "site-packages"], "PYTHONPATH"),
        "PATH": _joined([root / "usr/local/bin"], "PATH"),
        "LD_LIBRARY_PATH": _joined([home / "lib64", driver / "common", driver / "driver"], "LD_LIBRARY_PATH"),
        "ASCEND_ROOT_PREFIX": str(root),
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_TOOLKIT_HOME": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def run(command: list[str], env: dict[str, str]) -> int:
    """Run a command and return its exit code. Ctrl-C and SIGTERM are left to the command."""
    try:
        process = subprocess.Popen(command, env=env)
    except OSError as failure:
        print(f"error: {command[0]}: {failure.strerror}", flush=True)
        return 127
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends SIGINT to the command as well
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    return 128 - code if code < 0 else code


def _joined(first: list[Path], name: str) -> str:
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(name)])])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _install(root: Path, torch_version: str) -> Path:
    """Write the driver, CANN, and the metadata of an installed torch_npu; return CANN's home."""
    ascend = root / "usr/local/Ascend"
    _write(ascend / "driver/version.info", f"Version={DRIVER}\nascendhal_version=7.35.23\n")
    _write(ascend / "driver/lib64/common/libc_sec.so", "")
    _write(ascend / "driver/lib64/driver/libascend_hal.so", "")
    _write(root / "etc/ascend_install.info", "UserName=HwHiAiUser\nUserGroup=HwHiAiUser\nDriver_Install_Mode=normal\n")
    _write(root / "etc/group", "root:x:0:\nHwHiAiUser:x:4321:HwHiAiUser\n")
    major, minor = torch_version.split(".")[:2]
    cann = CANN.get((int(major), int(minor)), OLDER_CANN)
    home = ascend / "ascend-toolkit" / "latest"
    machine = platform.machine()
    _write(
        home / f"{machine}-linux/ascend_toolkit_install.info",
        f"package_name=Ascend-cann-toolkit\nversion={cann}\narch={machine}\nos=linux\npath={home}/{machine}-linux\n",
    )
    for library in ("libhccl.so", "libascendcl.so", "libge_runner.so"):
        _write(home / "lib64" / library, "")
    for part in ("opp", "runtime", "compiler"):
        _write(home / part / "version.info", f"Version={cann}\n")
    _write(home / "opp_kernel/version.info", f"Version={cann}\nversion_dir={cann}\n")
    _write(ascend / "ascend-toolkit/set_env.sh", SET_ENV.format(home=home))
    _write(home / "set_env.sh", SET_ENV.format(home=home))
    _write(
        root / f"site-packages/torch_npu-{torch_version}.dist-info/METADATA",
        f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {torch_version}\n",
    )
    return home
