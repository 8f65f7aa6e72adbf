"""setup_ascend.sh on imitated hosts: every layout of CANN, every floor, what it exports, what it leaves behind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ascend_hosts import Host, install_cann, make_host
from tools_npu import environment, host, setup

ROOT = Path(__file__).resolve().parent.parent.parent

# A stub, because setup_env.sh has its own tests: it records its flags and makes a Python with the requested pair.
SETUP = r"""
setup_env() {
    echo "setup_env $*" >>"$CALLS"
    if [ "${FAKE_SETUP:-}" = fails ]; then echo "error: no such index" >&2; exit 1; fi
    mkdir -p "$ROOT_OF_CLONE/.venv/bin"
    touch "$ROOT_OF_CLONE/.venv/setup.stamp"
    if [ "${1:-}" = --npu ]; then
        echo "${FAKE_AFTER:-$2}" >"$ROOT_OF_CLONE/.venv/torch_npu"
        cp "$STUBS/python.stub" "$ROOT_OF_CLONE/.venv/bin/python"
    fi
}
"""
# The Python of .venv: the real one, except when it is asked for the versions of torch and torch_npu.
PYTHON = r"""#!/bin/bash
case "$2" in
*"import torch_npu"*)
    version=$(cat "${0%/bin/python}/torch_npu")
    if [ -n "${PROBES:-}" ]; then echo probe >>"$PROBES"; fi
    case $version in
    broken) echo torch 2.9.0; echo "ImportError: undefined symbol: _ZN2at" >&2; exit 1 ;;
    no-hal) echo torch 2.9.0; echo "ImportError: libascend_hal.so: cannot open shared object file" >&2; exit 1 ;;
    esac
    echo "torch ${version%%.post*}"
    echo "torch_npu $version"
    case "$2" in *set_device*) if [ -n "${FAKE_CLOSED:-}" ]; then echo "closed $FAKE_CLOSED"; fi ;; esac
    ;;
*) exec REAL "$@" ;;
esac
"""


class Clone:
    """A copy of the scripts, and an imitated host."""

    def __init__(self, folder: Path):
        self.root, self.stubs, self.calls = folder / "clone", folder / "bin", folder / "calls"
        self.host_root = folder / "host"
        self.root.mkdir()
        self.stubs.mkdir()
        self.calls.touch()
        shutil.copy(ROOT / "setup_ascend.sh", self.root)
        shutil.copytree(ROOT / "tools_npu", self.root / "tools_npu", ignore=shutil.ignore_patterns("__pycache__"))
        (self.root / "setup_env.sh").write_text(SETUP)
        (self.stubs / "python.stub").write_text(PYTHON.replace("REAL", sys.executable))
        (self.stubs / "python.stub").chmod(0o755)
        (self.stubs / "python3").symlink_to(sys.executable)

    def environment(self, **more: str) -> dict[str, str]:
        return {
            "PATH": f"{self.stubs}:/usr/bin:/bin", "HOME": str(self.host_root / "home"), "CALLS": str(self.calls),
            "STUBS": str(self.stubs), "ROOT_OF_CLONE": str(self.root), "ASCEND_ROOT_PREFIX": str(self.host_root),
            **more,
        }  # fmt: skip

    def make_host(self, **options: object) -> Host:
        return make_host(self.host_root, **options)  # type: ignore[arg-type]

    def run(self, *flags: str, **more: str) -> tuple[int, str]:
        """Exit code and output of `bash setup_ascend.sh`."""
        done = subprocess.run(["bash", str(self.root / "setup_ascend.sh"), *flags], env=self.environment(**more),
                              capture_output=True, text=True, cwd="/")  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def shell(self, script: str, shell: str = "bash", **more: str) -> tuple[int, str]:
        """Exit code and output of a script in which $SETUP is the file to source."""
        env = self.environment(SETUP=str(self.root / "setup_ascend.sh"), **more)
        done = subprocess.run([shell, "-c", script], env=env, capture_output=True, text=True, cwd=self.root)
        return done.returncode, done.stdout + done.stderr

    def has_pair(self, torch_npu: str) -> None:
        """Make a .venv that has this torch_npu."""
        folder = self.root / ".venv" / "bin"
        folder.mkdir(parents=True)
        shutil.copy(self.stubs / "python.stub", folder / "python")
        (folder.parent / "torch_npu").write_text(torch_npu)
        (folder.parent / "setup.stamp").touch()

    @property
    def called(self) -> list[str]:
        return self.calls.read_text().splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


# --- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["cann", "ascend-toolkit", "nnae", "latest", "home"])
def test_every_layout_of_cann_is_found(clone: Clone, layout: str) -> None:
    made = clone.make_host(layout=layout, cann="8.5.0")
    code, out = clone.run()
    assert code == 0, out
    assert f"CANN 8.5.0 in {made.home}" in out
    assert "driver 24.1.rc1" in out and "2 card(s) davinci0 davinci1" in out
    assert clone.called == ["setup_env --npu 2.9.0 --python-max 12 --numpy 1"]


def test_the_cann_of_the_environment_wins_over_the_newest(clone: Clone) -> None:
    made = clone.make_host(layout="cann", cann="9.0.0")
    old, _ = install_cann(clone.host_root / "usr/local/Ascend", "ascend-toolkit", "8.3.RC1")
    env = clone.environment()
    assert [cann.version for cann in host.find_canns(env)] == ["9.0.0", "8.3.RC1"]
    env["ASCEND_HOME_PATH"] = str(old)
    assert [(cann.version, cann.layout) for cann in host.find_canns(env)] == [
        ("8.3.RC1", "environment"), ("9.0.0", "cann")]  # fmt: skip
    assert host.find_canns(env)[0].set_env == str(old.parent / "set_env.sh")
    assert made.set_env.exists()


def test_ascend_home_names_the_folder_above_cann_as_the_guides_set_it(clone: Clone) -> None:
    clone.make_host(layout="cann", cann="9.0.0")
    home, script = install_cann(clone.host_root / "data/Ascend", "ascend-toolkit", "8.5.0")
    env = clone.environment(ASCEND_HOME=str(clone.host_root / "data/Ascend"))
    assert host.find_canns(env)[0] == host.Cann(str(home), str(script), "8.5.0", "environment")
    for name in ("ASCEND_HOME", "ASCEND_HOME_PATH"):  # the folder of its set_env.sh, whose `latest` is CANN
        env[name] = str(script.parent)
        assert host.find_canns(env)[0] == host.Cann(str(home), str(script), "8.5.0", "environment")
        del env[name]
    env["ASCEND_HOME"] = str(clone.host_root / "data")  # nothing there: the usual folders
    assert [cann.layout for cann in host.find_canns(env)] == ["cann"]


# --- versions --------------------------------------------------------------------------------------


def test_cann_below_the_floor_is_refused(clone: Clone) -> None:
    clone.make_host(layout="ascend-toolkit", cann="8.2.RC1")
    code, out = clone.run()
    assert code == 1 and "CANN 8.2.RC1 is too old" in out and "CANN 8.2.RC1 版本过低" in out
    assert clone.called == []


@pytest.mark.parametrize(("LANG", "english", "chinese"), [("zh_CN.UTF-8", 0, 1), ("en_US.UTF-8", 1, 0), ("C", 1, 1)])
def test_a_refusal_is_told_in_the_chosen_language(clone: Clone, LANG: str, english: int, chinese: int) -> None:
    clone.make_host(layout="ascend-toolkit", cann="8.2.RC1")
    _, out = clone.run(LANG=LANG)
    assert (out.count("error: "), out.count("错误：")) == (english, chinese)
    assert (out.count("8.2.RC1 in "), out.count("8.2.RC1，位于")) == (english, chinese)
    (clone.root / "tools_npu" / "setup.py").unlink()
    _, out = clone.run(LANG=LANG)
    assert (out.count("error: "), out.count("错误：")) == (english, chinese)


def test_cann_without_a_readable_version_asks_for_a_torch_npu(clone: Clone) -> None:
    clone.make_host(layout="ascend-toolkit", cann="")
    code, out = clone.run()
    assert (code, "--torch-npu VERSION" in out) == (1, True)
    assert clone.run("--torch-npu", "2.8.0.post2")[0] == 0
    assert clone.called == ["setup_env --npu 2.8.0.post2 --python-max 12 --numpy 1"]


def test_a_requested_torch_npu_is_installed_if_it_is_new_enough(clone: Clone) -> None:
    clone.make_host()
    code, out = clone.run("--torch-npu", "2.6.0.post5")
    assert code == 1 and "2.6.0.post5 is too old" in out
    assert clone.run(NANOCHAT_TORCH_NPU="2.9.0.post4")[0] == 0
    assert clone.called == ["setup_env --npu 2.9.0.post4 --python-max 13 --numpy 1"]


def test_old_glibc_is_refused(
    clone: Clone, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clone.make_host()
    monkeypatch.setattr(setup, "glibc", lambda: (2, 27))
    monkeypatch.setenv("ASCEND_ROOT_PREFIX", str(clone.host_root))
    assert setup.main(["--dry-run"]) == 1
    assert "glibc 2.27" in capsys.readouterr().err


# --- hosts that lack something ---------------------------------------------------------------------


def test_a_host_without_npu_ends_with_3(clone: Clone) -> None:
    code, out = clone.run()
    assert code == 3 and "no Ascend NPU" in out and "本机没有昇腾 NPU" in out


def test_cards_without_cann_name_the_folders_that_were_searched(clone: Clone) -> None:
    made = clone.make_host(layout="cann")
    shutil.rmtree(made.root / "usr/local/Ascend/cann-8.5.0")
    code, out = clone.run()
    assert code == 1 and "/usr/local/Ascend/{cann,ascend-toolkit,nnae,latest}" in out


@pytest.mark.parametrize(("cards", "code"), [(2, 1), (0, 0)])
def test_a_torch_npu_that_does_not_load_is_a_warning_only_where_an_image_is_built(
    clone: Clone, cards: int, code: int
) -> None:
    clone.make_host(cards=cards)
    ended, out = clone.run(FAKE_AFTER="no-hal")
    assert ended == code, out
    assert "libascend_hal.so" in out and ("no card is visible" in out) == (cards == 0)


def test_a_failed_installation_ends_with_1(clone: Clone) -> None:
    clone.make_host()
    code, out = clone.run(FAKE_SETUP="fails")
    assert code == 1 and "no such index" in out and "type the same command again" in out


def test_a_pair_that_loads_and_fits_is_kept_even_if_a_card_does_not_open(clone: Clone) -> None:
    clone.make_host(cann="9.0.0")
    clone.has_pair("2.8.0.post4")
    code, out = clone.run()
    assert code == 0 and "2.8.0.post4" in out
    code, out = clone.run(FAKE_CLOSED="SetPrecisionMode: error code is 500001")
    assert code == 0 and "warning: card 0" in out and "500001" in out
    assert clone.called == ["setup_env --numpy 2"] * 2


def test_a_card_that_gives_no_answer_is_asked_once(clone: Clone, tmp_path: Path) -> None:
    clone.make_host(cann="9.0.0")
    clone.has_pair("2.8.0.post4")
    code, out = clone.run(FAKE_CLOSED=setup.NO_ANSWER, PROBES=str(tmp_path / "probes"))
    assert code == 0 and "warning: card 0 does not open: no answer within 180 s" in out
    assert "leave it out of ASCEND_RT_VISIBLE_DEVICES" in out
    assert (tmp_path / "probes").read_text() == "probe\n"


def test_no_python_at_all(clone: Clone) -> None:
    (clone.stubs / "python3").unlink()
    for command in ("bash", "dirname", "mktemp", "rm"):
        (clone.stubs / command).symlink_to(shutil.which(command) or "")
    code, out = clone.run(PATH=str(clone.stubs))
    assert (code, "Python 3.10 or later is needed" in out) == (1, True)


# --- an existing environment -----------------------------------------------------------------------


@pytest.mark.parametrize("there", ["2.12.0", "broken"])
def test_a_pair_that_does_not_fit_or_load_is_replaced(clone: Clone, there: str) -> None:
    clone.make_host(cann="9.0.0")
    clone.has_pair(there)
    assert clone.run()[0] == 0
    assert clone.called == ["setup_env --npu 2.10.0.post2 --python-max 13 --numpy 2"]


def test_fix_rebuilds_a_broken_environment(clone: Clone) -> None:
    clone.make_host()
    clone.has_pair("broken")
    assert clone.run("--fix")[0] == 0
    assert (clone.root / ".venv/setup.busy").exists(), "setup_env.sh deletes a .venv that has this mark"


def test_fix_installs_what_was_removed_or_replaced_beside_a_pair_that_loads(clone: Clone) -> None:
    """Such as numpy 2 beside a CANN before 9.0."""
    clone.make_host(cann="8.5.0")
    clone.has_pair("2.9.0")
    stamp = clone.root / ".venv/setup.stamp"
    for flags, text in (((), ""), (("--fix", "--dry-run"), ""), (("--fix",), "stale\n")):
        assert clone.run(*flags)[0] == 0 and stamp.read_text() == text
    assert not (clone.root / ".venv/setup.busy").exists()


def test_dry_run_prints_and_changes_nothing_even_in_a_terminal_without_chinese(clone: Clone) -> None:
    made = clone.make_host()
    code, out = clone.run("--dry-run", PYTHONIOENCODING="ascii")
    assert code == 0
    assert "would run: bash -c" in out and "setup_env --npu 2.9.0 --python-max 12 --numpy 1" in out
    assert "export TASK_QUEUE_ENABLE=2" in out and f"export ASCEND_HOME_PATH={made.home}" in out
    assert clone.called == [] and not (clone.root / ".venv").exists()


def test_variables_of_the_user_win(clone: Clone) -> None:
    clone.make_host()
    script = 'source "$SETUP" >/dev/null; echo "$HCCL_CONNECT_TIMEOUT $PYTORCH_NPU_ALLOC_CONF"'
    words = clone.shell(script, HCCL_CONNECT_TIMEOUT="600", PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:64")[1]
    assert words == "600 max_split_size_mb:64\n"


def test_the_allocator_variable_is_renamed_for_the_torch_npu(clone: Clone) -> None:
    clone.make_host(cann="9.4.0")
    script = 'source "$SETUP" >/dev/null; echo "$PYTORCH_ALLOC_CONF ${PYTORCH_NPU_ALLOC_CONF-unset}"'
    assert clone.shell(script, PYTORCH_NPU_ALLOC_CONF="max_split_size_mb:64")[1] == "max_split_size_mb:64 unset\n"


def test_a_wrong_flag_ends_with_2(clone: Clone) -> None:
    assert clone.run("--fast")[0] == 2


# --- the shell that sources it ---------------------------------------------------------------------

SHELLS = [shell for shell in ("bash", "zsh", "dash") if shutil.which(shell)]


@pytest.mark.parametrize("shell", SHELLS)
def test_sourced_it_sets_the_variables(clone: Clone, shell: str) -> None:
    made = clone.make_host()
    script = '. "$SETUP" >/dev/null; echo "code $?"; env'
    if shell == "dash":
        script = script.replace('"$SETUP"', "./setup_ascend.sh")
    code, out = clone.shell(script, shell, LD_LIBRARY_PATH="/own")
    assert code == 0
    lines = out.splitlines()
    driver = made.root / "usr/local/Ascend/driver/lib64"
    assert "code 0" in lines
    for line in [
        "TASK_QUEUE_ENABLE=2",
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
        "CPU_AFFINITY_CONF=2",
        "HCCL_CONNECT_TIMEOUT=1200",
        "HCCL_EXEC_TIMEOUT=1836",
        "HCCL_WHITELIST_DISABLE=1",
        f"ASCEND_OPP_PATH={made.home}/opp",
        f"LD_LIBRARY_PATH={driver}/common:{driver}/driver:{driver}:{made.home}/lib64:/own",
        f"VIRTUAL_ENV={clone.root}/.venv",
    ]:
        assert line in lines, out
    assert any(line.startswith(f"PATH={clone.root}/.venv/bin:{made.home}/bin:") for line in lines)


@pytest.mark.parametrize("shell", SHELLS)
def test_sourced_it_leaves_no_names_and_changes_no_options(clone: Clone, shell: str) -> None:
    clone.make_host(cann="8.2.RC1")
    source = ". ./setup_ascend.sh" if shell == "dash" else '. "$SETUP"'
    for options in ("set +e", "set -u"):
        script = (
            f'{options}; before=$-; {source} >/dev/null 2>&1; echo "code $?"; [ "$before" = "$-" ] && echo same; set'
        )
        _, out = clone.shell(script, shell)
        assert "code 1" in out.splitlines() and "same" in out.splitlines(), out
        assert [line for line in out.splitlines() if line.startswith("nanochat_")] == []
    assert clone.shell(f"{source} >/dev/null 2>&1 || echo alive", shell) == (0, "alive\n")


def test_sourced_twice_paths_are_there_once(clone: Clone) -> None:
    made = clone.make_host()
    script = """source "$SETUP" >/dev/null; one="$PATH $LD_LIBRARY_PATH"; source "$SETUP"
[ "$one" = "$PATH $LD_LIBRARY_PATH" ]"""
    code, out = clone.shell(script)
    assert code == 0, out
    assert str(made.home) in out and "kept" in out


def test_harmful_variables_are_named_and_fix_removes_them(clone: Clone) -> None:
    clone.make_host()
    harmful = {"ASCEND_LAUNCH_BLOCKING": "1", "ASCEND_GLOBAL_LOG_LEVEL": "0", "HCCL_CONNECT_TIMEOUT": "9"}
    for flags in ([], ["--fix"]):  # a script that was started cannot unset a variable of the shell
        code, out = clone.run(*flags, **harmful)
        assert code == 0 and out.count("source setup_ascend.sh --fix") > 1, out
        assert all(f"warning: {name}=" in out for name in harmful)
    harmful["PYTORCH_NPU_ALLOC_CONF"] = "max_split_size_mb:128"  # as older guides set it
    shown = '"${ASCEND_LAUNCH_BLOCKING-gone} $ASCEND_GLOBAL_LOG_LEVEL $HCCL_CONNECT_TIMEOUT $PYTORCH_NPU_ALLOC_CONF"'
    out = clone.shell(f'source "$SETUP" --fix; echo {shown}', **harmful)[1]
    assert out.splitlines()[-1] == "gone 3 1200 expandable_segments:True"
    for name, value in harmful.items():  # what was changed is said, with the old value
        assert any("--fix" in line and name in line and value in line for line in out.splitlines()), out


def test_values_in_another_encoding_arrive_whole(clone: Clone) -> None:
    """Such as names of folders in a terminal that uses GBK."""
    clone.make_host()
    env = {name.encode(): value.encode() for name, value in clone.environment(LANG="C.UTF-8").items()}
    env |= {b"NANOCHAT_BASE_DIR": b"/data/\xd5\xc5", b"PATH": env[b"PATH"] + b":/opt/\xd5\xc5"}
    script = f'. {clone.root}/setup_ascend.sh >/dev/null; echo "$NANOCHAT_BASE_DIR $PATH"'
    said = subprocess.run(["bash", "-c", script], env=env, capture_output=True, cwd="/", check=True).stdout
    assert said.startswith(b"/data/\xd5\xc5 ") and said.endswith(b":/opt/\xd5\xc5\n")


def test_values_with_quotes_and_blanks_arrive_whole(clone: Clone) -> None:
    old: dict[str, str] = {"A": "1", "C": "gone", "BASH_FUNC_f%%": "() { :; }"}
    lines = environment.changes(old, {"A": "1", "B": 'it\'s "two" words $HOME'})
    assert [line for line in lines if not line.startswith("ulimit")] == [
        "export B='it'\"'\"'s \"two\" words $HOME'",
        "unset C",
    ]
