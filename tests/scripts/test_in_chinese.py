"""With Chinese chosen, each line that a user meets has Chinese, apart from the frozen list of formats."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_docs import ROOT
from tests.support.english_lines import english_lines
from tests.support.forks import forks
from tests.support.qwens import write_folder

FINETUNE = ("scripts.finetune", "--max_length=48", "--target_examples_per_step=4", "--num_iterations=4",
            "--device_batch_size=2", "--out_tag=made", "--no-compile")  # fmt: skip
CHAT = ("scripts.chat_cli", "-i", "tune", "-g", "made")
CALL = re.compile(r"^\[.*?( = .*?| \.\.\.)\]$", re.DOTALL | re.MULTILINE)


def printed(folder: Path, *words: str, fails: bool = False, typed: str = "") -> tuple[str, str]:
    """What a script prints to standard output and to standard error."""
    variables = {
        **os.environ,
        "NANOCHAT_LANG": "zh",
        "NANOCHAT_BASE_DIR": str(folder / "base"),
        "PYTHONPATH": str(ROOT),
    }
    code, out, err = forks().run(list(words), folder, variables, typed)
    assert bool(code) == fails and "Traceback" not in err, err
    return out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, a file of conversations, and a file with a bad line."""
    folder = tmp_path_factory.mktemp("chinese")
    (folder / "model").mkdir()
    write_folder(folder / "model", "qwen3")
    lines = []
    for number in range(40):
        question, answer = f"the cat {number}", f"sat {number}"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "bad.jsonl").write_text("\n".join([*lines, '{"messages": [']))
    return folder


@pytest.mark.slow
@pytest.mark.smoke
def test_a_fine_tuning_a_chat_and_three_faults_are_in_chinese(folder: Path) -> None:
    texts = [
        *printed(folder, *FINETUNE, "--model=model", "--data=chats.jsonl"),
        # standard output has only the model's own words, and the notes have its calculator call
        CALL.sub("", printed(folder, *CHAT, typed="the cat\n/help\n/save\n")[1]),
        *printed(folder, *FINETUNE, "--modle=model", fails=True),
        *printed(folder, *FINETUNE, "--model=absent", "--data=chats.jsonl", fails=True),
        *printed(folder, *FINETUNE, "--model=model", "--data=bad.jsonl", "--resume=none", fails=True),
    ]
    lines = [line for text in texts for line in english_lines(text)]
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("language", ["zh", "en"])
def test_a_python_without_torch_is_told_which_one_to_use(language: str) -> None:
    """The Python of the system, in a terminal where nobody has sourced setup_ascend.sh."""
    command = [sys.executable, "-S", "-m", "scripts.finetune", "--model=model"]  # -S: without site-packages
    environment = {"PATH": os.environ["PATH"], "NANOCHAT_LANG": language}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and ".venv/bin/activate" in done.stderr
    assert done.stderr.startswith("错误：" if language == "zh" else "error: ") and len(done.stderr.splitlines()) == 1
