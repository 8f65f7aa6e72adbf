"""tools_npu: which versions fit, what is read from a host and from npu-smi's tables, which variables are harmful."""

import ast
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.ascend_hosts import make_host
from tools_npu import environment, host, host_checks, setup, versions

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("cann", "torch_npu", "warned"),
    [
        ("8.3.RC1", "2.8.0", False),
        ("8.3.RC2", "2.8.0", True),
        ("8.5.0", "2.9.0", False),
        ("8.5.1", "2.9.0", True),
        ("9.0.0", "2.10.0.post2", False),
        ("9.1.0", "2.12.0", False),
        ("9.3.0", "2.14.0", True),
        ("10.0.0", "2.14.0", True),
    ],
)
def test_cann_decides_the_pair(cann: str, torch_npu: str, warned: bool) -> None:
    pick = versions.resolve(cann)
    assert (pick.torch_npu, bool(pick.warning[0])) == (torch_npu, warned)
    assert pick.torch == torch_npu.partition(".post")[0]


@pytest.mark.parametrize(
    ("cann", "numpy"), [("8.3.RC1", 1), ("8.5.1", 1), ("9.0.RC1", 1), ("9.0.0", 2), ("9.1.0", 2), ("", 1)]
)
def test_cann_decides_the_numpy(cann: str, numpy: int) -> None:
    assert versions.numpy_for(cann) == numpy


def test_the_choice_of_a_pair_is_explained_with_the_others_that_fit() -> None:
    english, chinese = versions.explain("9.1.0", versions.resolve("9.1.0"), named=False)
    assert english.startswith("CANN 9.1.0 -> torch_npu 2.12.0 -> torch 2.12.0: ")
    assert "2.11.0, 2.10.0.post4, 2.9.0.post6, 2.7.1.post8 fit too" in english
    assert "2.10.0.post4" in chinese and "--torch-npu" in chinese
    named = versions.explain("9.1.0", versions.pick_named("2.10.0.post4"), named=True)
    assert named[0].startswith("CANN 9.1.0 -> torch_npu 2.10.0.post4 -> torch 2.10.0, ")


@pytest.mark.parametrize(
    ("torch_npu", "cann", "status"),
    [
        ("2.9.0.post2", "9.0.0", "PASS"),
        ("2.9.0", "9.0.0", "WARN"),  # an older package works with a newer CANN
        ("2.9.0.post2", "8.5.0", "FAIL"),
        ("2.9.0.post4", "9.0.0", "WARN"),  # not listed: needs the CANN of post2
        ("2.9.0.post9", "9.0.0", "FAIL"),  # not listed: needs the CANN of post6
        ("2.13.0", "9.1.0", "WARN"),
        ("2.13.0", "8.5.0", "FAIL"),
        ("2.14.0", "9.2.0", "WARN"),
        ("2.9.0", "", "WARN"),
    ],
)
def test_installed_versions_are_compared_with_the_table(torch_npu: str, cann: str, status: str) -> None:
    assert versions.cann_fits(torch_npu, cann).status == status


def test_the_remedy_changes_something_where_set_up_keeps_what_is_installed() -> None:
    assert "--torch-npu 2.12.0" in versions.remedy(versions.cann_fits("2.13.0", "9.1.0"), "9.1.0")[0]  # a WARN
    assert "--torch-npu" not in versions.remedy(versions.cann_fits("2.12.0", "8.3.RC1"), "8.3.RC1")[0]  # a FAIL


@pytest.mark.parametrize(
    ("numpy", "cann", "python", "status"),
    [
        ("2.3.1", "8.5.0", (3, 12), "FAIL"),
        ("1.26.4", "8.5.0", (3, 12), "PASS"),
        ("2.3.1", "9.0.0", (3, 12), "PASS"),
        ("2.3.1", "8.5.0", (3, 13), "PASS"),
        ("2.3.1", "", (3, 11), "PASS"),
    ],
)
def test_numpy_2_does_not_fit_a_cann_before_9(numpy: str, cann: str, python: tuple[int, int], status: str) -> None:
    assert versions.numpy_fits(numpy, cann, python).status == status


def test_torch_and_torch_npu_of_different_releases_do_not_fit() -> None:
    pairs = [("2.9.0+cpu", "2.9.0.post2"), ("2.10.0", "2.9.0"), ("2.6.0", "2.6.0")]
    assert [versions.pair_fits(*pair).status for pair in pairs] == ["PASS", "FAIL", "FAIL"]


def test_a_version_that_stands_only_in_version_cfg_is_read(tmp_path: Path) -> None:
    (tmp_path / "version.cfg").write_text("# the\nruntime_running_version=[7.6.T11.0.B056:8.3.RC1]\n")
    assert host.cann_version(tmp_path) == "8.3.RC1"


def test_a_user_must_be_root_or_in_the_group_if_it_exists(tmp_path: Path) -> None:
    made = make_host(tmp_path)
    env = {"ASCEND_ROOT_PREFIX": str(made.root)}
    assert host.may_use_devices(env, 0, [0])
    assert host.may_use_devices(env, 1000, [1000, 4321])
    assert not host.may_use_devices(env, 1000, [1000])
    (made.root / "etc/group").write_text("root:x:0:\n")
    assert host.may_use_devices(env, 1000, [1000]), "without the group every user passes"


def test_a_cann_of_another_user_is_named_and_a_closed_driver_or_base_folder_is_no_crash() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # pytest's own folders are closed to other users
        made = make_host(Path(folder) / "host", layout="ascend-toolkit")
        env = {"ASCEND_ROOT_PREFIX": str(made.root), "HOME": folder}
        closed = (made.set_env.parent, made.root / "usr/local/Ascend/driver")
        for path in closed:
            path.chmod(0)
        is_root = os.geteuid() == 0
        try:
            if is_root:
                os.seteuid(65534)
            inventory = setup.take_inventory(env)
            assert (inventory.cann, inventory.driver) == (None, None)
            with pytest.raises(setup.Refusal, match=f"may not read {closed[0]}: .* with --install-for-all"):
                setup.choose_pair(inventory, "", env)
            told = {line.name: line for line in host_checks.driver_and_cann(inventory, env)}
            assert str(closed[0]) in told["cann"].english and "~/Ascend" in told["cann"].remedy_in("zh")
            assert list(host_checks.limits(closed[0] / "nanochat/base"))
            env["ASCEND_HOME_PATH"] = str(made.home)
            assert host.closed_cann(env) == str(made.home)
        finally:
            if is_root:
                os.seteuid(0)
            for path in closed:
                path.chmod(0o755)


@pytest.mark.parametrize(
    ("variables", "torch_npu", "expected"),
    [
        ({"PYTORCH_ALLOC_CONF": "a:b", "PYTORCH_NPU_ALLOC_CONF": "a:b"}, "2.13.0",
         [("FAIL", "PYTORCH_NPU_ALLOC_CONF")]),
        ({"PYTORCH_NPU_ALLOC_CONF": "a:b"}, "2.13.0", []),  # every release reads the older name
        ({"PYTORCH_ALLOC_CONF": "a:b"}, "2.12.0", [("WARN", "PYTORCH_ALLOC_CONF")]),
        ({"PYTORCH_ALLOC_CONF": "a:b"}, "2.12.0.post3", []),
        ({"HCCL_ASYNC_ERROR_HANDLING": "1"}, "2.12.0", []),
        ({"HCCL_ASYNC_ERROR_HANDLING": "1"}, "2.9.0.post9", [("WARN", "HCCL_ASYNC_ERROR_HANDLING")]),
        ({"PYTORCH_NPU_ALLOC_CONF": "a:b"}, "2.9.0", []),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:9"}, "2.9.0",
         [("FAIL", "PYTORCH_NPU_ALLOC_CONF")]),
        ({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:9"}, "2.9.0", [("WARN", "PYTORCH_NPU_ALLOC_CONF")]),
        ({"PYTORCH_NPU_ALLOC_CONF": "garbage_collection_threshold:0.9"}, "2.9.0", [("WARN", "PYTORCH_NPU_ALLOC_CONF")]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "", [("WARN", "CUDA_VISIBLE_DEVICES")]),
        ({"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}, "", []),
        ({"HCCL_EXEC_TIMEOUT": "soon"}, "", [("FAIL", "HCCL_EXEC_TIMEOUT")]),
        ({"ASCEND_HOME_PATH": "/no/such/folder", "ASCEND_OPP_PATH": "/"}, "", [("FAIL", "ASCEND_HOME_PATH")]),
        ({"ASCEND_HOME_PATH": "/"}, "", [("WARN", "ASCEND_HOME_PATH")]),
        ({"TASK_QUEUE_ENABLE": "0", "ASCEND_SLOG_PRINT_TO_STDOUT": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "",
         [("WARN", "ASCEND_SLOG_PRINT_TO_STDOUT"), ("WARN", "TASK_QUEUE_ENABLE"),
          ("WARN", "TORCH_DEVICE_BACKEND_AUTOLOAD")]),
        ({}, "2.13.0", []),
    ],
)  # fmt: skip
def test_harmful_variables_are_found(
    variables: dict[str, str], torch_npu: str, expected: list[tuple[str, str]]
) -> None:
    assert [(finding.status, finding.name) for finding in environment.lint(variables, torch_npu)] == expected


def test_the_exported_variables_pass_the_lint() -> None:
    for torch_npu in ("2.7.1", "2.13.0"):
        exported = {variable.name: variable.value for variable in environment.exported_variables(torch_npu)}
        assert environment.lint(exported, torch_npu) == []


# --- npu-smi, with published tables -----------------------------------------------------------------------------------

PUBLISHED = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1.b030            Version: 24.1.rc1.b030                                        |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 101.8       43                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3318 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | OK            | 92.0        39                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3314 / 65536         |
+===========================+===============+====================================================+
"""
# The two dies of an A3 card and the processes that hold them; the table shows no power for the second die.
A3 = """
+------------------------------------------------------------------------------------------------+
| npu-smi 25.3.rc1                 Version: 25.3.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 6     Ascend910           | OK            | 243.3       53                0    / 0             |
| 0     12                  | 0000:85:00.0  | 17          0    / 0          50719/ 65536         |
+------------------------------------------------------------------------------------------------+
| 6     Ascend910           | Alarm         | -           50                0    / 0             |
| 1     13                  | 0000:87:00.0  | 17          0    / 0          50242/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 5                                                            |
+===========================+===============+====================================================+
| 6       0                 | 3085960       |                          | 47426                   |
| 6       1                 | 3085961       | python3.11               | 122                     |
+===========================+===============+====================================================+
"""
# An inference card: one column of memory, no power.
INFERENCE = """
| 8     310P3               | OK            | NA          42                0     / 0            |
| 0     0                   | 0000:08:00.0  | 0           1696 / 21527                           |
"""
TOPOLOGY = """
\t   NPU0       NPU1       NPU2       CPU Affinity
NPU0       X          HCCS       PIX        144-167
NPU1       HCCS       X          SYS        144-167
NPU2       PIX        SYS        X          96-119

Legend:

  X    = Self
  HCCS = Connection traversing HCCS.
"""


@pytest.mark.parametrize("more", ["", " 412                     |", " NA                      |"])
def test_a_process_is_read_with_and_without_its_id_in_a_container(more: str) -> None:
    line = "| 6       1                 | 3085961       | python3.11               | 122                     |"
    assert host.parse_smi(line + more)[2] == [host.Holder(6, 1, 3085961, "python3.11", 122)]


def test_a_container_s_driver_without_version_info_gives_its_libraries(tmp_path: Path) -> None:
    """What the Ascend Docker Runtime mounts: lib64 and include, and no version.info."""
    path = tmp_path / "usr/local/Ascend/driver"
    for name in ("lib64/common", "lib64/driver", "include"):
        (path / name).mkdir(parents=True)
    env = {"ASCEND_ROOT_PREFIX": str(tmp_path)}
    libraries = tuple(str(path / name) for name in ("lib64/common", "lib64/driver", "lib64"))
    assert host.find_driver(env) == host.Driver("", str(path), libraries)
    (path / "version.info").write_text("Version=25.5.0\n")
    assert host.find_driver(env) == host.Driver("25.5.0", str(path), libraries)


def test_the_published_table_is_read() -> None:
    version, cards, holders = host.parse_smi(PUBLISHED)
    assert (version, holders) == ("24.1.rc1.b030", [])
    assert cards == [
        host.Card(0, 0, "910B3", "OK", "101.8", 43, "0000:C1:00.0", 0, 3318, 65536),
        host.Card(1, 0, "910B3", "OK", "92.0", 39, "0000:C2:00.0", 0, 3314, 65536),
    ]


def test_two_dies_of_a_card_and_their_processes_are_read() -> None:
    version, cards, holders = host.parse_smi(A3)
    assert version == "25.3.rc1"
    assert [(card.npu, card.chip, card.name, card.health, card.power, card.used_mb) for card in cards] == [
        (6, 0, "Ascend910", "OK", "243.3", 50719),
        (6, 1, "Ascend910", "Alarm", "-", 50242),
    ]
    assert holders == [host.Holder(6, 0, 3085960, "", 47426), host.Holder(6, 1, 3085961, "python3.11", 122)]


def test_an_inference_card_is_read() -> None:
    (card,) = host.parse_smi(INFERENCE)[1]
    assert (card.npu, card.name, card.power, card.used_mb, card.total_mb) == (8, "310P3", "NA", 1696, 21527)


def test_links_between_cards_are_read() -> None:
    links = host.parse_topology(TOPOLOGY)
    assert links == {
        "NPU0": {"NPU1": "HCCS", "NPU2": "PIX"},
        "NPU1": {"NPU0": "HCCS", "NPU2": "SYS"},
        "NPU2": {"NPU0": "PIX", "NPU1": "SYS"},
    }
    assert host.parse_topology("npu-smi: not supported\n") == {}


@pytest.mark.parametrize(
    ("stub", "why"),
    [
        ("echo fine", ""),
        ("echo dcmi module initialize failed. ret is -8005; exit 1", "dcmi module initialize failed. ret is -8005"),
        ("exit 3", "npu-smi: exit code 3"),
        (None, "npu-smi: not found"),
    ],
)
def test_npu_smi_that_fails_says_why(tmp_path: Path, stub: str | None, why: str) -> None:
    if stub:
        (tmp_path / "npu-smi").write_text(f"#!/bin/bash\n{stub}\n")
        (tmp_path / "npu-smi").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ASCEND_ROOT_PREFIX": str(tmp_path / "none")}
    assert host.run_smi(["info"], env)[1] == why


def test_npu_smi_finds_the_libraries_of_the_driver(tmp_path: Path) -> None:
    """In a container, nothing but the user's LD_LIBRARY_PATH names them."""
    made = make_host(tmp_path / "host")
    (tmp_path / "npu-smi").write_text('#!/bin/bash\necho "$LD_LIBRARY_PATH"\n')
    (tmp_path / "npu-smi").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "ASCEND_ROOT_PREFIX": str(made.root), "LD_LIBRARY_PATH": "/mine"}
    driver = made.root / "usr/local/Ascend/driver/lib64"
    assert host.run_smi(["info"], env)[0] == f"{driver}/common:{driver}/driver:{driver}:/mine\n"


def test_an_npu_smi_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("npu-smi", host.SMI_SECONDS)

    (tmp_path / "npu-smi").write_text("")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setattr(subprocess, "run", hang)
    assert host.run_smi(["info"], {"PATH": str(tmp_path)})[1] == "npu-smi: no answer within 30 s"


@pytest.mark.parametrize(
    ("visible", "left", "wrong"),
    [
        (None, [0, 1], []),
        ("", [0, 1], []),
        ("1", [1], []),
        ("0, 1", [0, 1], []),
        ("0,5,x", [0], ["5", "x"]),
    ],
)
def test_visible_cards(visible: str | None, left: list[int], wrong: list[str]) -> None:
    env = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    assert host.visible_cards(env, 2) == (left, wrong)


OLD_PYTHON = [*ROOT.glob("check_npu.py"), *ROOT.glob("tools_npu/*.py")]


@pytest.mark.parametrize("path", OLD_PYTHON, ids=lambda path: path.name)
def test_the_scripts_that_start_on_any_python_parse_on_3_8(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))
    future = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert future or not functions, "without it, Python 3.8 evaluates annotations such as `str | None`"


# These four run in processes of their own, with the Python of the project.
PROJECT_PYTHON = {"bench.py", "collectives.py", "device_checks.py", "numerics.py"}


@pytest.mark.parametrize(
    "path", [path for path in OLD_PYTHON if path.name not in PROJECT_PYTHON], ids=lambda path: path.name
)
def test_the_scripts_that_start_on_any_python_call_no_string_method_of_3_9(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not names & {"removeprefix", "removesuffix"}
