"""setup_env.sh on fake machines: what it refuses, what it can do without, and what a kill leaves behind."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

# The commands that set-up takes from the system. Every other command on PATH is a stub.
SYSTEM = "awk bash cat cksum cp cut dirname env find flock grep head kill mkdir mv rm sed sleep sort tail touch"

# A Python that makes "environments" by copying itself, and a uv that fails on request. Both record their calls.
PYTHON = r"""#!/bin/bash
version="${version:-3 11 1}"
echo "python $*" >>"$CALLS"
case "$1 $2" in
*ensurepip*) echo "$version" ;;
*sys.version*) echo "python 3.11.0" ;;
*Python.h*) exit "${FAKE_NO_HEADERS:-0}" ;;
*find_spec*) exit "${FAKE_NO_TORCH_NPU:-0}" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip")
    case "$* $PIP_USER" in
    *install*" 1") echo "ERROR: Can not perform a '--user' install."; exit 1 ;;
    esac
    case "$*" in
    *"config list") printf '%s\n' "${FAKE_PIP_CONFIG:-}" ;;
    *uv.lock) [ "${FAKE_UV:-}" != absent ] && cp "$STUBS/uv.stub" "${0%python}uv" ;;
    *install*) [ "${FAKE_PIP:-}" != broken ] || { echo "pip: no such index"; exit 1; } ;;
    esac ;;
esac
"""
UV = r"""#!/bin/bash
echo "uv $* index=$UV_DEFAULT_INDEX extra=$UV_INDEX links=$UV_FIND_LINKS insecure=$UV_INSECURE_HOST" >>"$CALLS"
case "${FAKE_UV:-}" in
broken) echo "uv: no such index"; exit 2 ;;
slow) sleep 0.2 ;;
deadly) kill -9 $PPID ;;
esac
case "$*" in */rustbpe) exit "${FAKE_RUSTBPE:-0}" ;; esac
"""
DF = r"""#!/bin/bash
echo Filesystem 1024-blocks Used Available Capacity Mounted on
echo /dev/fake 9 9 $((${FAKE_GB:-100} * 1048576)) 9% /
"""


class Machine:
    """A folder with setup_env.sh, and a PATH that has only stubs and a few system commands."""

    def __init__(self, folder: Path):
        self.root = folder / "clone"
        self.stubs = folder / "bin"
        self.calls = folder / "calls"
        self.environment: dict[str, str] = {}
        self.root.mkdir()
        (self.root / "locks").mkdir()
        (self.root / "runs").mkdir()
        shutil.copy(ROOT / "runs" / "words.sh", self.root / "runs")
        self.stubs.mkdir()
        self.calls.touch()
        for name in ("setup_env.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "locks" / "requirements.lock").write_text(
            "numpy==1 \\\n    --hash=sha256:1\nuv==1.0 \\\n    --hash=sha256:2\n"
        )
        (self.root / "locks" / "requirements-torch.lock").write_text("torch==1\n")
        (self.root / "locks" / "requirements-dev.lock").write_text("pytest==1\n")
        (self.root / "locks" / "requirements-clients.lock").write_text("litellm==1\n")
        for name in ("requirements-npu.lock", "requirements-pairs.lock", "requirements-numpy1.lock"):
            shutil.copy(ROOT / "locks" / name, self.root / "locks")
        (self.root / "rustbpe").mkdir()
        (self.root / "rustbpe" / "Cargo.toml").write_text("[package]\n")
        for command in SYSTEM.split():
            if place := shutil.which(command):
                (self.stubs / command).symlink_to(place)
        self.stub("uv.stub", UV)
        self.stub("df", DF)
        self.stub("python3", PYTHON)
        self.stub("cargo")
        self.stub("g++")

    def stub(self, name: str, text: str = "#!/bin/bash\n") -> None:
        path = self.stubs / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def python(self, name: str, version: str) -> None:
        """Make a stub Python called `name`; `version` is `major minor whole`."""
        self.stub(name, PYTHON.replace("${version:-3 11 1}", version))

    def start(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        base = {"PATH": str(self.stubs), "HOME": str(self.root), "CALLS": str(self.calls), "STUBS": str(self.stubs)}
        return subprocess.Popen(
            ["bash", str(self.root / "setup_env.sh"), *flags],
            env=base | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.root.parent,
        )

    def run(self, *flags: str, **environment: str) -> tuple[int, str, str]:
        """Run set-up; returns its exit code, standard output and standard error."""
        process = self.start(*flags, **environment)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def called(self, words: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if words in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_complete_machine_installs_the_locks_with_uv(machine: Machine) -> None:
    code, out, err = machine.run()
    assert (code, err) == (0, "")
    locks = [line.split("-r ")[1].split()[0].split("/")[-1] for line in machine.called("uv pip") if "-r " in line]
    assert locks == ["requirements.lock", "requirements-torch.lock"]
    assert all("--require-hashes" in line for line in machine.called("-r "))
    assert machine.called("--no-deps --no-build-isolation --editable")
    assert machine.called("--no-deps --no-build-isolation " + str(machine.root / "rustbpe"))
    assert "ready" in out and "compil" not in out
    assert not (machine.root / ".venv" / "setup.busy").exists()


def test_a_second_call_does_nothing_also_after_dev_and_without_cargo(machine: Machine) -> None:
    machine.run()
    assert machine.run("--dev")[0] == 0
    assert machine.called("requirements-dev.lock")
    calls = len(machine.called(" pip "))
    stamp = machine.root / ".venv" / "setup.stamp"
    before = stamp.stat().st_mtime_ns
    assert machine.run() == (0, "", "")
    (machine.stubs / "cargo").unlink()  # as for another user of the folder
    assert machine.run() == (0, "", "")
    assert len(machine.called(" pip ")) == calls
    assert stamp.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("environment", "english", "chinese"),
    [
        ({"LANG": "zh_CN.UTF-8"}, False, True),
        ({"LANG": "zh_CN.UTF-8", "NANOCHAT_LANG": "en"}, True, False),
        ({"LANG": "en_US.UTF-8"}, True, False),
        ({"LANG": "C.UTF-8"}, True, True),
        ({}, True, True),
    ],
)
def test_a_failure_is_told_in_the_chosen_language(
    machine: Machine, environment: dict[str, str], english: bool, chinese: bool
) -> None:
    (machine.stubs / "python3").unlink()
    code, _, err = machine.run(**environment)
    assert code == 1 and "apt-get install -y python3.11" in err
    assert ("error: " in err, "错误：" in err) == (english, chinese)


def test_in_chinese_every_step_is_named_in_chinese(machine: Machine) -> None:
    code, out, _ = machine.run("--dev", LANG="zh_CN.UTF-8")
    assert code == 0 and "setup：软件包（" in out
    alone = [line for line in out.splitlines() if not line.startswith("setup：") or " s)" in line]
    assert alone == []


@pytest.mark.parametrize(("version", "newest"), [("3 8 1", "3.8"), (None, "none was found")])
def test_without_a_python_that_is_new_enough_one_is_named(machine: Machine, version: str | None, newest: str) -> None:
    if version:
        machine.python("python3", version)
    else:
        (machine.stubs / "python3").unlink()
    code, _, err = machine.run()
    assert code == 1
    assert "Python 3.10" in err and newest in err and "python3.11" in err and "错误：" in err
    assert not (machine.root / ".venv").exists()


@pytest.mark.parametrize("name", ["locks/requirements.lock", "pyproject.toml", "rustbpe/Cargo.toml"])
def test_a_changed_input_installs_again(machine: Machine, name: str) -> None:
    machine.run()
    calls = len(machine.called("uv pip"))
    with open(machine.root / name, "a") as f:
        f.write("# changed\n")
    assert machine.run()[0] == 0
    assert len(machine.called("uv pip")) == 2 * calls


def test_the_newest_python_that_can_make_an_environment_is_used(machine: Machine) -> None:
    machine.python("python3", "3 15 1")
    assert "Python 3.15" in machine.run()[1], "newer than 3.13, but the only one"
    shutil.rmtree(machine.root / ".venv")
    machine.python("python3.10", "3 10 1")
    machine.python("python3.11", "3 11 1")
    machine.python("python3.12", "3 12 0")
    machine.stub("python3.13", "#!/bin/bash\necho 'not enabled here' >&2\nexit 127\n")
    assert "Python 3.11" in machine.run()[1]


def test_venv_missing_names_the_package(machine: Machine) -> None:
    machine.python("python3", "3 12 0")
    code, _, err = machine.run()
    assert code == 1 and "apt-get install -y python3.12-venv" in err
    assert not (machine.root / ".venv").exists()


def test_a_full_disk_is_refused_until_torch_is_installed(machine: Machine) -> None:
    code, _, err = machine.run(FAKE_GB="3")
    assert code == 1 and "3 GB free" in err and "剩余 3 GB" in err
    assert not (machine.root / ".venv").exists()
    machine.run()
    (machine.root / ".venv/lib/python3.11/site-packages/torch").mkdir(parents=True)
    assert machine.run("--dev", FAKE_GB="3")[0] == 0


def test_without_cargo_the_published_wheel_is_used(machine: Machine) -> None:
    (machine.stubs / "cargo").unlink()
    code, out, _ = machine.run()
    assert code == 0 and "published rustbpe wheel" in out
    assert not machine.called("/rustbpe ")
    machine.stub("cargo")
    machine.run()
    assert machine.called("/rustbpe "), "a toolchain installed later is used"


def test_rustbpe_that_does_not_build_falls_back_to_the_wheel(machine: Machine) -> None:
    code, out, _ = machine.run(FAKE_RUSTBPE="1")
    assert code == 0 and "rustbpe could not be built" in out
    installed = [line.split("/")[-1].split()[0] for line in machine.called("uv pip")]
    assert installed[-2:] == ["rustbpe", "requirements.lock"]


@pytest.mark.parametrize(("missing", "named"), [("compiler", "g++"), ("headers", "python3-dev")])
def test_without_a_compiler_models_run_uncompiled(machine: Machine, missing: str, named: str) -> None:
    if missing == "compiler":
        (machine.stubs / "g++").unlink()
    code, out, _ = machine.run(FAKE_NO_HEADERS=str(int(missing == "headers")))
    assert code == 0
    assert "models run uncompiled" in out
    assert f"To fix this: apt-get install -y {named}\n" in out


@pytest.mark.parametrize("uv", ["absent", "broken"])
def test_if_uv_fails_pip_installs(machine: Machine, uv: str) -> None:
    code, out, _ = machine.run(FAKE_UV=uv)
    assert code == 0
    assert "falling back to pip" in out
    installed = [line for line in machine.called("python -m pip install") if "uv.lock" not in line]
    assert len([line for line in installed if "--require-hashes -r" in line]) == 2
    assert any("--editable" in line for line in installed)


@pytest.mark.parametrize("uv", ["", "absent"])
def test_a_host_whose_pip_installs_for_the_user_is_set_up(machine: Machine, uv: str) -> None:
    code, out, err = machine.run(PIP_USER="1", FAKE_UV=uv)
    assert code == 0, err
    assert ("falling back to pip" in out) == (uv == "absent")


def test_no_index_says_how_to_set_a_mirror_and_the_next_call_resumes(machine: Machine) -> None:
    code, _, err = machine.run(FAKE_UV="broken", FAKE_PIP="broken")
    assert code == 1
    for words in ("pip: no such index", "pip config set global.index-url URL", "设置镜像", ".venv/setup.log"):
        assert words in err
    environments = len(machine.called("-m venv"))
    assert machine.run()[0] == 0
    assert len(machine.called("-m venv")) == environments, "a refusal keeps the environment"


def test_settings_of_pip_are_passed_to_uv_and_those_of_uv_win(machine: Machine) -> None:
    config = "\n".join(
        [
            ":env:.index-url='https://mirror.example/simple'",
            "global.extra-index-url='\\nhttps://one.example\\nhttps://two.example'",
            "global.find-links='/wheels /more'",
            "global.index-url='https://other.example'",
            "global.trusted-host='mirror.example'",
        ]
    )
    machine.run(FAKE_PIP_CONFIG=config)
    line = machine.called("requirements.lock")[0]
    assert "index=https://mirror.example/simple extra=https://one.example https://two.example" in line
    assert "links=/wheels,/more insecure=mirror.example" in line
    shutil.rmtree(machine.root / ".venv")
    machine.run(FAKE_PIP_CONFIG=config, UV_DEFAULT_INDEX="https://uv.example")
    assert "index=https://uv.example" in machine.called("requirements.lock")[-1]


def test_a_moved_folder_or_one_without_its_python_rebuilds_the_environment(machine: Machine) -> None:
    machine.run()
    machine.root = machine.root.rename(machine.root.parent / "elsewhere")
    assert "ready" in machine.run()[1]
    assert len(machine.called("-m venv")) == 2
    (machine.root / ".venv/bin/python").unlink()
    assert "ready" in machine.run()[1]
    assert len(machine.called("-m venv")) == 3


def test_killed_in_the_middle_and_typed_again(machine: Machine) -> None:
    assert machine.run(FAKE_UV="deadly")[0] == -9
    half = machine.root / ".venv" / "half-written"
    half.touch()
    code, out, _ = machine.run()
    assert code == 0
    assert "ready" in out
    assert not half.exists(), "files that a killed set-up left behind are deleted"
    assert machine.run() == (0, "", "")


def test_killed_while_it_deletes_a_half_made_environment(machine: Machine) -> None:
    """rm takes files in any order, so it may take both marks first."""
    assert machine.run(FAKE_UV="deadly")[0] == -9
    (machine.root / ".venv" / "half-written").touch()
    machine.stub(
        "rm",
        f"""#!/bin/bash
mv {machine.root}/.venv/half-written {machine.root}/half-written
{shutil.which("rm")} "$@"
[ -e {machine.root}/.venv ] || mkdir {machine.root}/.venv
mv {machine.root}/half-written {machine.root}/.venv
kill -9 $PARENT
""",
    )
    starter = 'export PARENT=$$; exec bash "$0"'
    command = ["bash", "-c", starter, str(machine.root / "setup_env.sh")]
    environment = {"PATH": str(machine.stubs), "HOME": str(machine.root), "CALLS": str(machine.calls),
                   "STUBS": str(machine.stubs)}  # fmt: skip
    assert subprocess.run(command, env=environment, capture_output=True).returncode == -9
    assert (machine.root / ".venv" / "half-written").exists()
    (machine.stubs / "rm").unlink()
    (machine.stubs / "rm").symlink_to(shutil.which("rm") or "")
    code, _, err = machine.run()
    assert code == 0 and not (machine.root / ".venv" / "half-written").exists(), err


def test_an_environment_behind_a_link_is_left_alone(machine: Machine) -> None:
    machine.run()
    elsewhere = machine.root.parent / "elsewhere"
    (machine.root / ".venv").rename(elsewhere)
    (machine.root / ".venv").symlink_to(elsewhere)
    before = sorted(path.name for path in elsewhere.iterdir())
    (elsewhere / "setup.stamp").write_text("root /another/clone\n")
    assert machine.run()[0] == 0
    assert sorted(path.name for path in elsewhere.iterdir()) == before and not (machine.root / ".venv").is_symlink()


def test_two_at_once_install_once(machine: Machine) -> None:
    processes = [machine.start(FAKE_UV="slow") for _ in range(3)]
    output = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], output
    assert sum("ready" in out for out, _ in output) == 1
    assert len(machine.called("-m venv")) == 1


def test_an_environment_of_the_user_is_kept(machine: Machine) -> None:
    own = machine.root / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    code, _, err = machine.run()
    assert code == 1 and "was not made by this script" in err and own.exists()


def test_an_ascend_host_keeps_its_own_torch(machine: Machine) -> None:
    assert machine.run(NANOCHAT_DEVICE="npu", FAKE_NO_TORCH_NPU="1")[0] == 1
    assert machine.run(NANOCHAT_DEVICE="npu")[0] == 0
    assert not machine.called("requirements-torch.lock")


def test_an_unknown_flag_is_named(machine: Machine) -> None:
    code, _, err = machine.run("--fast")
    assert code == 1 and "--fast" in err


def test_sourced_it_activates_the_environment(machine: Machine) -> None:
    script = f'source "{machine.root}/setup_env.sh" && setup_env >/dev/null && command -v python'
    env = {"PATH": str(machine.stubs), "HOME": "/", "CALLS": str(machine.calls), "STUBS": str(machine.stubs)}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == f"{machine.root}/.venv/bin/python\n", done.stderr


@pytest.mark.slow
def test_a_real_environment_runs_the_package(tmp_path: Path) -> None:
    """Without a Rust compiler that works, since test.sh itself has built rustbpe into the environment of this test."""
    clone = tmp_path / "clone"
    ignore = shutil.ignore_patterns(".git", ".venv*", "target", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, clone, ignore=ignore)
    stubs = tmp_path / "bin"
    stubs.mkdir()
    (stubs / "cargo").write_text("#!/bin/bash\nexit 1\n")
    (stubs / "cargo").chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    environment["PATH"] = f"{stubs}:{environment['PATH']}"
    done = subprocess.run(["bash", "setup_env.sh"], cwd=clone, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    code = "import nanochat.common, torch; print(nanochat.__file__)"
    shown = subprocess.run([clone / ".venv/bin/python", "-c", code], cwd="/", capture_output=True, text=True)
    assert shown.stdout.strip() == str(clone / "nanochat/__init__.py"), shown.stderr
    assert subprocess.run(["bash", "setup_env.sh"], cwd=clone, capture_output=True, env=environment).stdout == b""


NEWER_THAN_BASH_3 = r"declare -[Ag]|mapfile|readarray|\$\{\w+[,^]|wait -n|local -n|&>>|\|&|EPOCHSECONDS|@Q\}"


def test_the_scripts_of_the_readme_avoid_what_the_bash_of_macos_lacks() -> None:
    for name in ("setup_env.sh", "speedrun.sh", "test.sh", "runs/common.sh", "runs/runcpu.sh", "runs/finetune_demo.sh"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.findall(NEWER_THAN_BASH_3, text) == [], name
