"""Fake Ascend hosts: a root folder with CANN in one of its layouts, a driver, device files and a group."""

from dataclasses import dataclass
from pathlib import Path

SET_ENV = """# written like CANN's own: for bash, and without care for unset variables
export ASCEND_TOOLKIT_HOME={home}
export ASCEND_HOME_PATH={home}
export ASCEND_OPP_PATH={home}/opp
export LD_LIBRARY_PATH=${{ASCEND_HOME_PATH}}/lib64:$LD_LIBRARY_PATH
export PYTHONPATH=${{ASCEND_HOME_PATH}}/python/site-packages:$PYTHONPATH
export PATH=${{ASCEND_HOME_PATH}}/bin:$PATH
declare -a parts=(a b) && echo "${{parts[1]}} says CANN"
"""
INFO = """package_name=Ascend-cann-toolkit
version={version}
innerversion=V100R001C25B048
compatible_version=[V100R001C15],[V100R001C18]
arch=aarch64
os=linux
path={home}/aarch64-linux
"""
SMI_HEAD = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1.b030            Version: 24.1.rc1.b030                                        |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""


@dataclass(frozen=True)
class Host:
    """A fake host: its root folder, CANN's home, and CANN's set_env.sh."""

    root: Path
    home: Path
    set_env: Path


def install_cann(ascend: Path, layout: str, version: str) -> tuple[Path, Path]:
    """Install a fake CANN in an Ascend folder, laid out as `cann` (8.5 and later), `ascend-toolkit` or `nnae`.

    Returns CANN's home and its set_env.sh.
    """
    folder = ascend / layout
    home = folder if layout in ("cann", "latest") else folder / "latest"
    if layout == "cann":  # a folder with the version in its name, and a link to it
        (ascend / f"cann-{version}").mkdir(parents=True)
        folder.symlink_to(f"cann-{version}")
    for part in ("aarch64-linux", "opp", "lib64", "runtime", "compiler", "bin"):
        (home / part).mkdir(parents=True, exist_ok=True)
    name = "nnae" if layout == "nnae" else "toolkit"
    if version:
        info = home / "aarch64-linux" / f"ascend_{name}_install.info"
        info.write_text(INFO.format(version=version, home=home))
    write_ops(home, layout, version)
    (folder / "set_env.sh").write_text(SET_ENV.format(home=home))
    return home, folder / "set_env.sh"


def write_ops(home: Path, layout: str, version: str) -> None:
    """Install a fake ops package: up to CANN 8.3 one folder, later a folder for each group of operators."""
    folder = home / "share/info/ops_nn" if layout == "cann" else home / "opp_kernel"
    folder.mkdir(parents=True, exist_ok=True)
    text = f"Version={version}\n" if layout == "cann" else f"Version=8.3.T5.0.B028\nversion_dir={version}\n"
    (folder / "version.info").write_text(text)


def install_driver(root: Path, cards: int, version: str = "24.1.rc1") -> None:
    driver = root / "usr/local/Ascend/driver"
    for part in ("common", "driver"):
        (driver / "lib64" / part).mkdir(parents=True)
    (driver / "version.info").write_text(f"Version={version}\nascendhal_version=7.35.23\n")
    (root / "dev").mkdir()
    (root / "etc").mkdir()
    (root / "etc/group").write_text("root:x:0:\nHwHiAiUser:x:4321:HwHiAiUser\n")
    for name in ("davinci_manager", "devmm_svm", "hisi_hdc", *(f"davinci{number}" for number in range(cards))):
        (root / "dev" / name).touch()


def make_host(root: Path, layout: str = "cann", cann: str = "8.5.0", cards: int = 2) -> Host:
    """Make a host. Layout "home" is a CANN that the user installed in ~/Ascend, where ~ is `root`/home."""
    (root / "home").mkdir(parents=True)
    if layout == "home":
        home, script = install_cann(root / "home/Ascend", "cann", cann)
    else:
        home, script = install_cann(root / "usr/local/Ascend", layout, cann)
    if cards:
        install_driver(root, cards)
    return Host(root, home, script)


def smi_table(cards: int = 2, health: str = "OK", used_mb: int = 3314) -> str:
    """What `npu-smi info` prints on a host with 910B3 cards."""
    lines = [SMI_HEAD.strip()]
    for number in range(cards):
        hbm = f"{used_mb} / 65536"
        lines += [
            f"| {number:<5} 910B3               | {health:<13} | 101.8       43                0    / 0             |",
            f"| 0                         | 0000:C{number}:00.0  | 0           0    / 0          {hbm:<21}|",
            "+===========================+===============+====================================================+",
        ]
    return "\n".join(lines) + "\n"
