"""The scripts of runs/, which run on other machines."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_docs import problem

ROOT = Path(__file__).resolve().parent.parent.parent
LAUNCH = "python -m nanochat.runtime.launch"

# --- the scripts of runs/ --------------------------------------------------------------------------

PYTHON = r"""#!/bin/bash
case "$*" in
"-c "*"import cores"*) echo 2; exit ;;
"-m nanochat.device") echo "${FAKE_DEVICE:-npu} bfloat16 ${FAKE_CARDS:-8} fast"; exit ;;
"-m nanochat.common") echo "$HOME/base"; exit ;;
"-m nanochat.planner"*) echo "--depth=12 --total_batch_size=262144 --device_batch_size=16"; exit ;;
esac
echo "${0##*/} $*"
"""


class Clone:
    """The scripts, with stubs for the commands that they call; `setup_ascend.sh` ends with the code in FAKE_SETUP."""

    def __init__(self, folder: Path):
        self.root, self.stubs = folder / "clone", folder / "bin"
        (self.root / "runs").mkdir(parents=True)
        self.stubs.mkdir()
        for script in (ROOT / "runs").glob("*.sh"):
            (self.root / "runs" / script.name).write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
        (self.root / "setup_ascend.sh").write_text('echo "setup_ascend [$*]"; return "${FAKE_SETUP:-0}"\n')
        (self.root / "setup_env.sh").write_text("setup_env() { echo setup_env; }\n")
        (self.stubs / "python").write_text(PYTHON)
        (self.stubs / "python").chmod(0o755)

    def run(
        self, script: str, *flags: str, folder: Path | None = None, **environment: str
    ) -> tuple[int, list[str], str]:
        """Exit code, lines of standard output, standard error."""
        base = {"PATH": f"{self.stubs}:/usr/bin:/bin", "HOME": str(self.root), "ASCEND_HOME_PATH": "/a/CANN"}
        done = subprocess.run(["bash", str(self.root / "runs" / script), *flags], env=base | environment,
                              capture_output=True, text=True, timeout=60, cwd=folder)  # fmt: skip
        return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_the_fineweb_scripts_launch_stages_with_flags_that_exist(clone: Clone) -> None:
    said = []
    for script in ("download_fineweb_data.sh", "quick_fineweb_test.sh", "train_with_fineweb.sh"):
        code, lines, errors = clone.run(script)
        assert code == 0, errors
        said += [line for line in lines if line.startswith("python")]
    assert [why for line in said if (why := problem(shlex.split(line)))] == []
    assert said[0] == "python -m nanochat.dataset -n 200"
    quick, whole = (line for line in said if "base_train" in line)
    assert quick.startswith(f"{LAUNCH} --nproc_per_node=8 -m scripts.base_train -- ")
    assert "--depth=8" in quick and "--num_iterations=100" in quick
    for flag in ("--depth=12", "--total_batch_size=262144", "--num_iterations=5000", "--device_batch_size=16"):
        assert flag in whole
    trained = [line.partition(" -m ")[2] for line in said if "tok_train" in line]
    assert len(set(trained)) == 1, "the quick test must not replace the tokenizer of a model in training"


@pytest.mark.parametrize(
    "script",
    ["download_fineweb_data.sh", "quick_fineweb_test.sh", "train_with_fineweb.sh", "train_distributed_npu.sh"],
)
def test_help_is_shown_before_the_host_is_looked_at(clone: Clone, script: str) -> None:
    code, lines, errors = clone.run(script, "--help")
    assert code == 0, errors
    assert f"  bash runs/{script}" in "\n".join(lines) and "setup" not in errors
    assert [line for line in lines if line.startswith("python")] == []


SOURCED = {"common.sh", "sizes.sh", "words.sh"}
HELPFUL = ["speedrun.sh", "speedrun_npu.sh", "setup_ascend.sh", "setup_env.sh", "test.sh", "check_npu.py"]
HELPFUL += sorted(f"runs/{path.name}" for path in (ROOT / "runs").glob("*.sh") if path.name not in SOURCED)
CHINESE = re.compile("[\u4e00-\u9fff]")


def help_of(script: str, **environment: str) -> str:
    base = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "PYTHONUTF8": "1"}
    command = [sys.executable if script.endswith(".py") else "bash", script, "--help"]
    done = subprocess.run(command, env=base | environment, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("script", HELPFUL)
def test_help_is_in_the_language_that_is_chosen_and_shows_the_same_commands(script: str) -> None:
    english = help_of(script)
    chinese = help_of(script, LANG="zh_CN.UTF-8")
    assert not CHINESE.search(english) and english == help_of(script, LANG="zh_CN.UTF-8", NANOCHAT_LANG="en")
    assert chinese == help_of(script, NANOCHAT_LANG="zh", LC_ALL="C")
    commands = [
        [re.split(" {2,}| +#", line.strip())[0] for line in text.splitlines() if re.match(" {2,4}[^ ]", line)]
        for text in (english, chinese)
    ]
    assert commands[0] == commands[1] != []
    assert [
        line for line in chinese.splitlines() if line.strip() and not re.match(" |.*" + CHINESE.pattern, line)
    ] == []


@pytest.mark.parametrize("script", [name for name in HELPFUL if name.endswith(".sh")])
def test_a_script_finds_its_own_folder_whatever_cdpath_and_path_hold(script: str, tmp_path: Path) -> None:
    (tmp_path / ROOT.name / "runs").mkdir(parents=True)  # where `cd` would go first
    (tmp_path / "setup_env.sh").write_text("exit 9\n")  # what `source setup_env.sh` would read first
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/nowhere", "CDPATH": str(tmp_path)}
    command = ["bash", f"{ROOT.name}/{script}", "--help"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == help_of(script)


def test_speedrun_refuses_in_the_language_that_is_chosen() -> None:
    for language, start in (("zh", "错误：--preset "), ("en", "error: --preset ")):
        environment = {"PATH": os.environ["PATH"], "NANOCHAT_LANG": language, "PYTHONUTF8": "1"}
        command = ["bash", "speedrun.sh", "--preset", "none"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and line.startswith(start)


MESSAGE = re.compile(r"""^\s*(?:.*\|\| )?echo "([^"]*[a-z]{3,} [a-z]{2,} [^"]*)""", re.MULTILINE)


def test_no_script_prints_a_sentence_in_english_alone() -> None:
    """A pair of echo, or `tell`, prints it in Chinese too."""
    alone = []
    for path in [ROOT / "speedrun.sh", ROOT / "speedrun_npu.sh", *(ROOT / "runs").glob("*.sh")]:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            beside = "".join(lines[number : number + 3])
            if MESSAGE.match(line) and not CHINESE.search(beside):
                alone.append(f"{path.name}:{number + 1}")
    assert alone == []


def test_the_quick_test_takes_flags_and_a_mirror_with_few_shards(clone: Clone) -> None:
    code, lines, errors = clone.run("quick_fineweb_test.sh", "--shards", "1", "--num_iterations=20")
    assert code == 0, errors
    assert "python -m nanochat.dataset -n 1" in lines and lines[-1].endswith("--num_iterations=20")
    assert clone.run("quick_fineweb_test.sh", "--shards")[0] == 2


OLD_NAMES = {
    "check_npu_env.sh": "check_npu.py",
    "download_fineweb_data.sh": "runs/download_fineweb_data.sh",
    "emergency_npu_cleanup.sh": "check_npu.py --processes",
    "fix_ascend_env.sh": "setup_ascend.sh --fix",
    "launch_npu_training.py": "runs/launch_npu_training.py",
    "quick_fineweb_test.sh": "runs/quick_fineweb_test.sh",
    "setup_npu_env.sh": "setup_ascend.sh",
    "train_distributed_npu.sh": "runs/train_distributed_npu.sh",
    "train_with_fineweb.sh": "runs/train_with_fineweb.sh",
}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_the_names_of_older_guides_start_what_they_became(name: str, tmp_path: Path) -> None:
    """Each target is replaced by a script that prints how it was called."""
    (tmp_path / "runs").mkdir()
    (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"))
    file, _, flags = OLD_NAMES[name].partition(" ")
    echo = "import sys; print(*sys.argv)" if file.endswith(".py") else 'echo "${BASH_SOURCE[0]} $*"'
    (tmp_path / file).write_text(f"{echo}\n")
    starter = [sys.executable] if name.endswith(".py") else ["bash"]
    command = (
        ["bash", "-c", f"source {tmp_path / name}"]
        if name.startswith("setup")
        else [*starter, str(tmp_path / name), "8"]
    )
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/").stdout
    given = "" if name.startswith("setup") else "8"
    assert said.split() == [str(tmp_path / file), *flags.split(), *given.split()]


@pytest.mark.parametrize("cards", [7, 8])
@pytest.mark.parametrize(
    ("script", "flags", "row"),
    [
        ("quick_fineweb_test.sh", [], 2048),
        ("train_with_fineweb.sh", [], 2048),
        ("chinese.sh", [], 512),
        ("chinese.sh", ["--preset=cpu"], 512),
        ("chinese.sh", ["--preset=tiny"], 256),
    ],
)
def test_any_number_of_cards_shares_a_step_equally(
    clone: Clone, script: str, flags: list[str], row: int, cards: int
) -> None:
    code, lines, errors = clone.run(script, *flags, FAKE_CARDS=str(cards))
    assert code == 0, errors
    stages = [line for line in lines if "scripts.base_train" in line or "scripts.chat_sft" in line]
    assert stages
    for line in stages:
        for name, number in re.findall(r"--(total_batch_size|target_examples_per_step)=(\d+)", line):
            assert int(number) % (cards * (row if name == "total_batch_size" else 1)) == 0, line
        assert "chat_sft" not in line or "--target_examples_per_step=" in line  # whose default 3 cards cannot share


def test_a_recipe_stops_at_the_stage_that_failed(clone: Clone) -> None:
    stub = PYTHON.replace('echo "${0##*/} $*"', 'case "$*" in *tok_train*) exit 3 ;; esac; echo "${0##*/} $*"')
    (clone.stubs / "python").write_text(stub)
    code, lines, errors = clone.run("chinese.sh", "--preset", "tiny", **CPU)
    assert code == 3 and lines[-1] == "== tok_train" and "tok_train" in errors


PERSONA = str(ROOT / "docs/examples/persona.jsonl")
CPU = {"FAKE_DEVICE": "cpu", "FAKE_CARDS": "1", "NANOCHAT_DEVICE": "cpu"}


@pytest.mark.parametrize(
    ("script", "flags", "corpora"),
    [
        ("chinese.sh", [], ["fineweb-zh -n 16 --from hub", "fineweb -n 16 --from hub"]),
        (
            "chinese.sh",
            ["--data=fineweb-zh-v2.1:1,climbmix:2,mine:1", "--shards", "4", "--from=modelscope", "--mix", PERSONA],
            ["fineweb-zh-v2.1 -n 4 --from modelscope", "climbmix -n 4 --from modelscope"],
        ),
        ("chinese.sh", ["--preset", "cpu", "--data", "zh:0.6,en:0.4"], ["tinyworld"]),
        ("chinese.sh", ["--preset", "tiny"], ["tinyworld"]),
        ("runcpu.sh", [], ["fineweb -n 1 --from hub", "tinyworld"]),
        ("runcpu.sh", ["--preset=tiny"], ["tinyworld"]),
    ],
)
def test_the_recipes_run_every_stage_with_flags_that_exist(
    clone: Clone, script: str, flags: list[str], corpora: list[str]
) -> None:
    for environment in (CPU, {}):
        code, lines, errors = clone.run(script, *flags, **environment)
        assert code == 0, errors
        said = [
            re.sub("^python -m nanochat.runtime.cost .*? -- ", "", line) for line in lines if line.startswith("pyth")
        ]
        assert [why for line in said if (why := problem(shlex.split(line)))] == []
        fetched = [line.partition("--data ")[2] for line in said if "nanochat.dataset" in line]
        assert fetched == corpora
        modules = [line.partition("scripts.")[2].split()[0] for line in said if "scripts." in line]
        assert modules[0] == "preflight" and modules[1] == "tok_train" and "chat_sft" in modules
        origins = {line.rpartition(" --from ")[2] for line in fetched if "--from" in line}
        assert all(f" --from {origin} " in next(line for line in said if "preflight" in line) for origin in origins)
        data = next(line for line in said if "tok_train" in line).split()[4]
        assert all(f"--data {data} " in line for line in said if "preflight" in line or "base_train" in line)


@pytest.mark.parametrize(("flags", "tag"), [([], "zh-d12"), (["--mix", PERSONA], "zh-d12-persona")])
def test_the_chinese_recipe_measures_the_model_that_it_tuned(clone: Clone, flags: list[str], tag: str) -> None:
    _, lines, _ = clone.run("chinese.sh", *flags, **CPU)
    assert any("scripts.chat_sft" in line and f"--out_tag {tag} " in line for line in lines)
    measured = [line for line in lines if "--source sft" in line or "-i sft" in line]
    assert len(measured) == 2 and all(f"--model_tag {tag} " in line for line in measured)


@pytest.mark.parametrize("script", ["chinese.sh", "runcpu.sh"])
def test_a_recipe_says_what_it_needs_before_it_starts(clone: Clone, script: str) -> None:
    code, lines, _ = clone.run(script, "--plan", **CPU)
    assert code == 0 and "scripts.preflight" in lines[-1]
    for flags in (["--plans"], ["--preset", "none"], ["--data"], ["--data="]):
        code, lines, errors = clone.run(script, *flags, **CPU)
        assert (code, lines) == (2, []) and errors.startswith("error: ")
    code, lines, _ = clone.run(script, "--help")
    assert code == 0 and f"bash runs/{script}" in "\n".join(lines)


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("chinese.sh", ("--preset", "tiny", "--data", "mine")),
        ("chinese.sh", ("--shards=4", "--preset=tiny")),
        ("chinese.sh", ("--preset", "cpu", "--depth", "6")),
        ("runcpu.sh", ("--preset", "tiny", "--steps", "100")),
        ("runcpu.sh", ("--data", "mine", "--preset", "tiny")),
    ],
)
def test_a_recipe_refuses_a_flag_that_its_preset_sets(clone: Clone, script: str, flags: tuple[str, ...]) -> None:
    code, lines, errors = clone.run(script, *flags, **CPU)
    assert (code, lines) == (2, []) and re.search(r"^error: --preset \w+ sets --\w+ itself; leave --\w+ out\n$", errors)


def test_a_recipe_forgets_the_costs_of_earlier_runs_before_its_first_stage(clone: Clone) -> None:
    for script in ("chinese.sh", "runcpu.sh"):
        _, lines, _ = clone.run(script, "--preset", "tiny", **CPU)
        first = next(number for number, line in enumerate(lines) if "nanochat.runtime.cost" in line)
        begun = [
            number for number, line in enumerate(lines) if line.startswith("python -m nanochat.report begin --key ")
        ]
        assert len(begun) == 1 and begun[0] < first


def test_a_recipe_reads_your_file_from_the_folder_it_was_typed_in_or_refuses_it_at_once(clone: Clone) -> None:
    home = clone.root.parent / "my folder"
    home.mkdir()
    code, lines, errors = clone.run("chinese.sh", "--mix", "chats.jsonl", folder=home, **CPU)
    assert (code, lines) == (2, []) and f"got {home}/chats.jsonl" in errors
    (home / "chats.jsonl").touch()
    code, lines, errors = clone.run("chinese.sh", "--mix", "chats.jsonl", folder=home, **CPU)
    assert code == 0, errors
    assert any(line.endswith(f"--mix {home}/chats.jsonl") for line in lines if "chat_sft" in line)


@pytest.mark.parametrize("script", ["supervise.sh", "multinode_npu.sh"])
def test_files_of_the_folder_that_a_command_was_typed_in_are_found(clone: Clone, script: str) -> None:
    home = clone.root.parent / "my folder"
    (home / "Qwen3-0.6B").mkdir(parents=True)
    for name in ("chats.jsonl", "own", "more.jsonl"):
        (home / name).touch()
    words = ("--model", "Qwen3-0.6B", "--data", "own", "chats.jsonl:3", "more.jsonl", "--lr=0.5", "--mix=more.jsonl")
    code, lines, errors = clone.run(script, "scripts.finetune", *words, folder=home, **CPU)
    assert code == 0, errors
    found = lines[-1].partition("scripts.finetune ")[2].replace(f"{home}/", "@")
    assert found == "--model @Qwen3-0.6B --data own @chats.jsonl:3 @more.jsonl --lr=0.5 --mix=@more.jsonl"


def test_a_supervised_run_resumes_where_find_is_that_of_macos(clone: Clone) -> None:
    """That lacks -printf. The third start succeeds, and the first alone may start again from nothing."""
    (clone.stubs / "find").write_text('#!/bin/bash\n[[ " $* " != *" -printf "* ]] && exec /usr/bin/find "$@"\n')
    (clone.stubs / "find").chmod(0o755)
    command = clone.root / "train.sh"
    command.write_text('echo "$*" >>"$HOME/starts"\nstep=$(wc -l <"$HOME/starts")\n'
                       'mkdir -p "$HOME/base/base_checkpoints/d2/step_00000$step"\n[ $step -eq 3 ]\n')  # fmt: skip
    limits = {"SUPERVISE_TRIES": "1", "SUPERVISE_PAUSE": "0", "NANOCHAT_BASE_DIR": str(clone.root / "base")}
    code, _, errors = clone.run("supervise.sh", "bash", str(command), "--resume=none", "--depth=2", **limits)
    assert code == 0, errors
    starts = (clone.root / "starts").read_text().splitlines()
    assert starts == ["--resume=none --depth=2", "--depth=2", "--depth=2"]


def test_a_script_passes_its_flags_on_but_not_to_set_up(clone: Clone) -> None:
    _, lines, _ = clone.run("train_with_fineweb.sh", "--num_iterations=10000", NPROC_PER_NODE="1")
    assert lines[0] == "setup_ascend []"
    assert lines[-1].startswith("python -m scripts.base_train ") and lines[-1].endswith("--num_iterations=10000")
    for flags in ("", " --from modelscope"):
        code, lines, errors = clone.run("download_fineweb_data.sh", "8", *flags.split())
        assert (code, lines) == (0, ["setup_ascend []", f"python -m nanochat.dataset -n 8{flags}"]), errors


def test_the_launcher_of_the_guides_takes_a_number_of_cards_and_flags(clone: Clone) -> None:
    code, lines, errors = clone.run("train_distributed_npu.sh", "4", "--model", "./Qwen3-0.6B", "--lora_rank=8")
    assert code == 0, errors
    start = f"python {clone.root}/runs/launch_npu_training.py --npus=4 "
    assert lines == ["setup_ascend []", f"{start}--model ./Qwen3-0.6B --lora_rank=8"]
    assert clone.run("train_distributed_npu.sh")[1][-1].endswith("--npus=8")
    assert clone.run("train_distributed_npu.sh", "9")[0] == 2


def launched(monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    """The words of the command that runs/launch_npu_training.py becomes."""
    became: list[str] = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.extend(words))
    monkeypatch.setattr(sys, "argv", ["launch_npu_training.py", *flags])
    runpy.run_path(str(ROOT / "runs/launch_npu_training.py"), run_name="__main__")
    return became


def test_the_settings_of_the_guides_are_flags_and_the_command_line_overrides_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = launched(monkeypatch, "--npus", "8", "--data", "a.jsonl", "b.jsonl", "--checkpoint-activations")
    assert problem(["python", *words[1:]]) is None
    assert words[1:4] == ["-m", "nanochat.runtime.launch", "--nproc_per_node=8"]
    assert words.count("--data") == 1 and "--no-checkpoint_activations" not in words
    for flag in ("--max_length=512", "--device_batch_size=6", "--learning_rate=1e-05", "--lora_rank=0"):
        assert flag in words
    assert launched(monkeypatch, "--npus=1")[1:3] == ["-m", "scripts.finetune"]
    assert "--checkpoint_activations" not in launched(monkeypatch, "--npus=1", "--no-checkpoint-activations")


def test_settings_that_a_windows_editor_has_saved_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.toml").write_text("\ufeffmax_length = 64\r\n", encoding="utf-8")
    assert "--max_length=64" in launched(monkeypatch, "--npus=1", f"--config={tmp_path}/mine.toml")


def test_the_launcher_of_the_guides_speaks_chinese(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_LANG", "zh")
    with pytest.raises(SystemExit, match="2"):
        launched(monkeypatch, "--npus=0")
    assert capsys.readouterr().err == "错误：--npus 必须至少为 1，现在是 0\n"


@pytest.mark.parametrize(
    ("content", "said"), [("[lora]\nrank = 8", r"holds the table \[lora\]"), ("rank 8", "cannot be read as TOML")]
)
def test_a_wrong_file_of_settings_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, said: str
) -> None:
    (tmp_path / "mine.toml").write_text(content)
    with pytest.raises(SystemExit, match=said):
        launched(monkeypatch, "--npus=1", f"--config={tmp_path}/mine.toml")
    with pytest.raises(SystemExit, match="2"):
        launched(monkeypatch, "--npus=0")


@pytest.mark.parametrize(
    ("environment", "code", "first"),
    [
        ({"FAKE_SETUP": "3", "FAKE_DEVICE": "cpu", "FAKE_CARDS": "1"}, 0, "setup_ascend []"),  # without NPU: the CPU
        ({"ASCEND_HOME_PATH": "", "FAKE_DEVICE": "cpu", "FAKE_CARDS": "1"}, 0, "setup_env"),  # no card, driver or CANN
        ({"NANOCHAT_DEVICE": "cpu", "FAKE_DEVICE": "cpu", "FAKE_CARDS": "1"}, 0, "setup_env"),
        ({"NANOCHAT_DEVICE": "npu", "FAKE_SETUP": "3"}, 1, "setup_ascend []"),  # an NPU is required, but there is none
        ({"FAKE_SETUP": "1"}, 1, "setup_ascend []"),  # unusable NPUs are an error, never a silent fallback
        ({"NPROC_PER_NODE": "9"}, 2, "setup_ascend []"),
        ({"NPROC_PER_NODE": "x"}, 2, "setup_ascend []"),
        ({"NPROC_PER_NODE": "x", "NANOCHAT_DEVICE": "cpu", "FAKE_DEVICE": "cpu"}, 2, "setup_env"),
    ],
)
def test_the_device_of_the_host_decides(clone: Clone, environment: dict[str, str], code: int, first: str) -> None:
    ended, lines, errors = clone.run("quick_fineweb_test.sh", **environment)
    assert (ended, lines[0]) == (code, first), errors
    assert (code == 0) == lines[-1].startswith("python -m scripts.base_train ")
    assert code == 0 or "error:" in errors
    if environment.get("FAKE_DEVICE") == "cpu" and code:  # a CPU runs any number of processes
        assert "NPROC_PER_NODE must be the number of processes, 1 or more, got x" in errors


@pytest.mark.parametrize("is_link", [False, True])
def test_supervise_counts_what_a_start_has_saved_wherever_the_base_folder_is(clone: Clone, is_link: bool) -> None:
    (clone.root / "disk").mkdir()
    if is_link:
        (clone.root / "base").symlink_to(clone.root / "disk")
    target = "disk" if is_link else "base"
    saves = f'mkdir -p "$HOME/{target}/base_checkpoints/d2/step_$$"; mkdir "$HOME/first" && exit 7 || exit 0'
    environment = {"SUPERVISE_TRIES": "1", "SUPERVISE_PAUSE": "0", "NANOCHAT_BASE_DIR": "~/base"}
    assert clone.run("supervise.sh", "bash", "-c", saves, **environment)[0] == 0


def test_supervise_gives_up_with_the_reason_as_its_last_line(clone: Clone) -> None:
    fails = 'echo "error: rank 1 was killed (SIGKILL)" >"$NANOCHAT_REASON_FILE"; exit 7'
    code, _, errors = clone.run("supervise.sh", "bash", "-c", fails, SUPERVISE_TRIES="2", SUPERVISE_PAUSE="0")
    assert code == 7 and errors.splitlines()[-1] == "error: rank 1 was killed (SIGKILL)"
    assert errors.splitlines()[-2].startswith("supervise: 2 starts in a row ended with code 7")
    code, _, errors = clone.run("supervise.sh", "bash", "-c", "exit 7", SUPERVISE_TRIES="1")
    assert code == 7 and errors.splitlines()[-1] == "error: the lines above say why"


@pytest.mark.parametrize("words", [["--resume=none"], ["--resume", "none"], ["-resume", "4"], ["--resume=4"]])
def test_supervise_leaves_resume_out_once_a_start_has_saved(clone: Clone, words: list[str]) -> None:
    """The first start fails and saves nothing, the second one saves, and the third one succeeds."""
    runs = """
        echo "$*"; starts=$(cat "$HOME/starts" 2>/dev/null); echo "$starts." >"$HOME/starts"
        case $starts in
        ..) exit 0 ;;
        .) mkdir -p "$NANOCHAT_BASE_DIR/base_checkpoints/d2/step_000003" ;;
        esac
        exit 7"""
    given = {"SUPERVISE_PAUSE": "0", "NANOCHAT_BASE_DIR": str(clone.root / "base")}
    code, lines, errors = clone.run("supervise.sh", "bash", "-c", runs, "x", "--depth=2", *words, "--keep=9", **given)
    assert code == 0, errors
    whole = " ".join(["--depth=2", *words, "--keep=9"])
    assert lines == [whole, whole, "--depth=2 --keep=9"]


VOLCANO = {"VC_WORKER_NUM": "2", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
MODELARTS = {"MA_NUM_HOSTS": "2", "VC_TASK_INDEX": "1", "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job"}
BY_HAND = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "job-worker-0.job"}


@pytest.mark.parametrize("environment", [VOLCANO, MODELARTS, BY_HAND])
def test_hosts_meet_at_the_first_host(clone: Clone, environment: dict[str, str]) -> None:
    code, lines, errors = clone.run("multinode_npu.sh", "scripts.base_train", "--depth=20", **environment)
    assert code == 0, errors
    assert lines[-1] == (
        f"{LAUNCH} --nnodes=2 --node_rank=1 --nproc_per_node=8 --master_addr=job-worker-0.job --master_port=29500 "
        "-m scripts.base_train -- --depth=20"
    )
    assert problem(shlex.split(lines[-1])) is None


def test_the_users_variables_win_over_the_platforms(clone: Clone) -> None:
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29600", "NODE_RANK": "0", "NPROC_PER_NODE": "4"}
    _, lines, _ = clone.run("multinode_npu.sh", "scripts.base_train", **(VOLCANO | given))
    assert "--node_rank=0 --nproc_per_node=4 --master_addr=10.0.0.1 --master_port=29600" in lines[-1]


def test_one_host_needs_no_address(clone: Clone) -> None:
    _, lines, _ = clone.run("multinode_npu.sh", "scripts.base_train", "--depth=12")
    assert lines[-1] == f"{LAUNCH} --nproc_per_node=8 -m scripts.base_train -- --depth=12"


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"NNODES": "two"}, "NNODES"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "got '2'"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR"),
        (BY_HAND | {"MASTER_PORT": "295000"}, "MASTER_PORT"),
        (BY_HAND | {"MASTER_PORT": "10.0.0.1:29500"}, "MASTER_PORT"),
    ],
)
def test_missing_or_wrong_variables_of_hosts_are_refused(clone: Clone, environment: dict[str, str], name: str) -> None:
    code, lines, errors = clone.run("multinode_npu.sh", "scripts.base_train", **environment)
    assert (code, lines) == (2, []) and name in errors
    assert clone.run("multinode_npu.sh")[0] == 2
