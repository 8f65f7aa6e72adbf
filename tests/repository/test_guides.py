"""The guides: the index lists every chapter, and all Chinese texts use the same words for you and for ranks."""

import ast
import re
from pathlib import Path

import pytest

from tests.repository.test_docs import commands, problem

ROOT = Path(__file__).resolve().parent.parent.parent
TROUBLESHOOTING = ("故障排除手册.md", "docs/en/troubleshooting.md")
CHINESE = (
    "README_ASCEND.md",
    "NPU使用技巧.md",
    "华为昇腾运行指南.md",
    "故障排除手册.md",
    "README.zh.md",
    "docs/reliability.zh.md",
    *sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("docs/zh/*.md")),
)
SCRIPTS = ("check_npu.py", "setup_ascend.sh", "setup_env.sh", "speedrun.sh", "speedrun_npu.sh")
FOLDERS = ("tools_npu/*.py", "runs/*.sh", "nanochat/**/*.py", "scripts/*.py", "nanochat/serve/web/**/*.js")


@pytest.mark.parametrize("name", TROUBLESHOOTING)
def test_the_index_lists_every_chapter(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    chapters = [int(number) for number in re.findall(r"^## (\d+) ", text, re.M)]
    assert len(chapters) == 33
    assert [int(number) for number in re.findall(r"\| \[(\d+)\]\(#\1-", text)] == chapters


@pytest.mark.parametrize("name", CHINESE)
def test_a_chinese_page_says_ni_and_calls_ranks_processes(name: str) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.S)
    assert "您" not in prose
    assert [line for line in prose.splitlines() if re.search(r"\branks?\b", line.replace("local rank", ""))] == []


def strings(text: str) -> list[str]:
    """The strings of a Python file; the values of an f-string become x."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def test_chinese_messages_say_ni_and_call_ranks_processes() -> None:
    files = [ROOT / name for name in SCRIPTS] + [file for folder in FOLDERS for file in ROOT.glob(folder)]
    assert len(files) > 100
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert "您" not in text, file
        words = strings(text) if file.suffix == ".py" else [line for line in text.splitlines() if "错误：" in line]
        chinese = [word for word in words if re.search(r"[\u4e00-\u9fff，。：]", word)]
        assert [word for word in chinese if re.search(r"\brank", word)] == [], file


# What the published guides tell their readers to type, some files have moved to runs/.
PUBLISHED = r"""
bash setup_ascend.sh
source setup_ascend.sh
python check_npu.py
bash speedrun_npu.sh
bash speedrun.sh
python -m scripts.tok_train
python -m scripts.base_train --depth=12 --device_batch_size=16
python -m scripts.base_train --depth=8 --device_batch_size=8
python -m scripts.base_train --depth=8 --device_batch_size=4 --gradient_accumulation_steps=4
python -m scripts.mid_train --device_batch_size=8
python -m scripts.chat_sft --device_batch_size=4
python -m scripts.chat_rl --device_batch_size=4
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- \
    --depth=12 --device_batch_size=16 --total_batch_size=262144
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --max_seq_len=2048
torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16 --total_batch_size=262144
torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
python -m scripts.chat_cli
python -m scripts.chat_web
bash runs/download_fineweb_data.sh
bash runs/quick_fineweb_test.sh
bash runs/train_with_fineweb.sh
bash runs/train_distributed_npu.sh 8
bash runs/train_distributed_npu.sh 4
python runs/launch_npu_training.py --npus 8
python runs/launch_npu_training.py --npus 4
"""


def test_the_commands_of_the_published_guides_are_understood() -> None:
    published = list(commands(PUBLISHED))
    assert len(published) == 26
    assert [f"{words}: {why}" for words in published if (why := problem(words))] == []
