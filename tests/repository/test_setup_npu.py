"""setup_env.sh --npu on fake machines: the pair of torch and torch_npu, and a Python for which it has wheels."""

import shutil
from pathlib import Path

import pytest

from tests.repository.test_setup import PYTHON, ROOT, UV, Machine
from tools_npu import versions as tables


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def versions(machine: Machine) -> list[str]:
    """The versions of torch and torch_npu that were installed, in order."""
    words = [word for line in machine.called("uv pip install") for word in line.split()]
    return [word for word in words if word.startswith(("torch==", "torch-npu==", "torch_npu=="))]


@pytest.fixture(autouse=True)
def pairs_are_recorded(machine: Machine) -> None:
    """The uv of these tests records the pins of the pair instead of the name of their file."""
    pair = 'case "$*" in *pair.lock) set -- "$@" $(grep "==" "${@: -1}") ;; esac\n'
    machine.stub("uv.stub", UV.replace("\n", f"\n{pair}", 1))


def test_the_requested_pair_is_installed_and_kept(machine: Machine) -> None:
    machine.stub("uname", "#!/bin/bash\necho aarch64\n")
    assert machine.run("--npu", "2.9.0.post2", "--python-max", "13")[0] == 0
    assert versions(machine) == ["torch-npu==2.9.0.post2", "torch==2.9.0", "torch==2.9.0"]
    (pair,) = machine.called("pair.lock")
    assert "--no-deps --require-hashes" in pair, "torch_npu requires a build of torch that indexes lack"
    lock = (machine.root / ".venv/pair.lock").read_text()
    assert [line.split()[0] for line in lock.splitlines() if "==" in line] == ["torch-npu==2.9.0.post2", "torch==2.9.0"]
    assert lock.count("--hash=sha256:") > 10
    assert "--require-hashes" in machine.called("requirements-npu.lock")[0], "what CANN imports is pinned"
    assert not machine.called("requirements-torch.lock")
    calls = len(machine.called(" pip "))
    assert machine.run()[:2] == (0, ""), "a later plain call, such as speedrun.sh's, keeps the pair"
    assert len(machine.called(" pip ")) == calls
    assert machine.run("--dev")[0] == 0
    assert versions(machine)[3:] == versions(machine)[:3], "adding the test tools keeps it too"
    assert machine.run("--npu", "2.12.0", "--python-max", "13")[0] == 0
    assert versions(machine)[6:] == ["torch==2.12.0+cpu", "torch-npu==2.12.0"]


def test_fix_marks_a_complete_environment_which_is_made_again(machine: Machine) -> None:
    flags = ("--npu", "2.9.0.post2", "--python-max", "13", "--numpy", "2")
    assert machine.run("--dev", *flags)[0] == 0
    broken = machine.root / ".venv/broken"
    broken.touch()
    (machine.root / ".venv/setup.busy").touch()  # as setup_ascend.sh --fix does
    code, out, _ = machine.run(*flags)
    assert code == 0 and "ready" in out and not broken.exists()
    assert len(machine.called("requirements-dev.lock")) == 2, "the test tools come back too"
    assert machine.run(*flags) == (0, "", "")
    with (machine.root / ".venv/setup.stamp").open("a") as stamp:
        stamp.write("stale\n")  # as it does if the pair loads
    assert "ready" in machine.run("--numpy", "2")[1] and len(machine.called("requirements-dev.lock")) == 3


def test_set_up_and_speedrun_agree_where_torch_npu_was_there_before(machine: Machine, tmp_path: Path) -> None:
    """setup_ascend.sh sees the cards and speedrun.sh gets NANOCHAT_DEVICE: neither asks for torch from the locks."""
    (tmp_path / "host/dev").mkdir(parents=True)
    (tmp_path / "host/dev/davinci0").touch()
    assert machine.run("--numpy", "2", ASCEND_ROOT_PREFIX=str(tmp_path / "host"))[0] == 0
    calls = len(machine.called(" pip "))
    assert not machine.called("requirements-torch.lock")
    assert machine.run(NANOCHAT_DEVICE="npu")[0] == 0
    assert len(machine.called(" pip ")) == calls


def test_a_host_whose_npus_cannot_be_used_trains_on_its_cpu(machine: Machine, tmp_path: Path) -> None:
    """speedrun_npu.sh offers NANOCHAT_DEVICE=cpu where CANN is missing, so no torch_npu can be installed."""
    (tmp_path / "host/dev").mkdir(parents=True)
    (tmp_path / "host/dev/davinci0").touch()
    host = {"ASCEND_ROOT_PREFIX": str(tmp_path / "host"), "FAKE_NO_TORCH_NPU": "1"}
    assert machine.run(**host)[0] == 1
    assert machine.run(NANOCHAT_DEVICE="cpu", **host)[0] == 0
    assert machine.called("requirements-torch.lock")


def test_every_pair_that_set_up_may_pick_has_hashes() -> None:
    pins = (ROOT / "locks" / "requirements-pairs.lock").read_text(encoding="utf-8").split()
    for row in (*tables.TABLE, tables.NEWEST):
        assert f"torch-npu=={row.torch_npu}" in pins and f"torch=={tables.torch_for(row.torch_npu)}" in pins


def test_a_torch_npu_without_known_hashes_is_installed_with_a_word_about_it(machine: Machine) -> None:
    machine.stub("uname", "#!/bin/bash\necho aarch64\n")
    code, out, _ = machine.run("--npu", "2.99.0", "--python-max", "13")
    assert code == 0 and "2.99.0 is unknown" in out
    assert versions(machine) == ["torch==2.99.0+cpu", "torch_npu==2.99.0"]


@pytest.mark.parametrize(("machine_name", "torch"), [("x86_64", "2.9.0"), ("aarch64", "2.11.0")])
def test_torch_without_cuda_is_installed_if_the_index_has_it(machine: Machine, machine_name: str, torch: str) -> None:
    machine.stub("uname", f"#!/bin/bash\necho {machine_name}\n")
    assert machine.run("--npu", torch, "--python-max", "12")[0] == 0
    assert versions(machine) == [f"torch=={torch}+cpu", f"torch-npu=={torch}"]
    without_builds_for_cpus(machine)
    code, out, _ = machine.run("--npu", torch, "--python-max", "12")
    assert (code, "falling back to pip" in out) == (0, False)
    assert versions(machine)[2:] == [f"torch=={torch}+cpu", f"torch-npu=={torch}", f"torch=={torch}", f"torch=={torch}"]
    assert "the plain torch brings 2 GB of CUDA, which nothing here uses" in out


def without_builds_for_cpus(machine: Machine) -> None:
    """Let the index have no +cpu, and no environment be there."""
    recorded = (machine.stubs / "uv.stub").read_text()
    fails = 'case "$*" in *+cpu) echo no such version; exit 1 ;; esac'
    first = 'case "${FAKE_UV'
    machine.stub("uv.stub", recorded.replace(first, f"{fails}\n{first}", 1))
    shutil.rmtree(machine.root / ".venv")


def test_cuda_that_comes_along_needs_room(machine: Machine) -> None:
    machine.stub("uname", "#!/bin/bash\necho aarch64\n")
    assert machine.run("--npu", "2.11.0", "--python-max", "13", FAKE_GB="4")[0] == 0
    without_builds_for_cpus(machine)
    code, _, err = machine.run("--npu", "2.11.0", "--python-max", "13", FAKE_GB="4")
    assert code == 1 and "4 GB free; the environment needs 8 GB" in err
    assert machine.run("--npu", "2.10.0.post2", "--python-max", "13", FAKE_GB="4")[0] == 0, "it has no CUDA"


def test_a_python_for_which_torch_npu_has_a_wheel_is_used(machine: Machine) -> None:
    for minor in (10, 11, 12, 13):
        machine.python(f"python3.{minor}", f"3 {minor} 1")
    assert "Python 3.11" in machine.run("--npu", "2.8.0", "--python-max", "11")[1]


def test_an_environment_whose_python_is_too_new_is_rebuilt(machine: Machine) -> None:
    machine.run()
    python = machine.root / ".venv/bin/python"
    python.write_text(PYTHON.replace('"$1 $2" in', '"$1 $2" in\n*version_info*) exit 1 ;;', 1))
    assert "ready" in machine.run("--npu", "2.8.0", "--python-max", "11")[1]
    assert len(machine.called("-m venv")) == 2


def test_without_a_python_for_torch_npu_one_is_named(machine: Machine) -> None:
    machine.python("python3", "3 13 1")
    code, _, err = machine.run("--npu", "2.8.0", "--python-max", "11")
    assert code == 1 and "3.10 to 3.11" in err and "apt-get install -y python3.11" in err


def test_beside_a_cann_that_needs_numpy_1_it_is_installed_after_every_lock(machine: Machine) -> None:
    flags = ("--npu", "2.9.0", "--python-max", "12", "--numpy", "1")
    assert machine.run(*flags, "--dev")[0] == 0
    locks = [line for line in machine.called("--require-hashes") if "requirements-" in line]
    assert "requirements-numpy1.lock" in locks[-1], "the others hold numpy 2"
    assert machine.run()[:2] == (0, ""), "a later plain call keeps numpy 1"
    assert machine.run("--numpy", "2")[0] == 0
    assert len(machine.called("requirements-numpy1.lock")) == 1, "CANN was upgraded"
