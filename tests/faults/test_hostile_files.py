"""Faults of files from elsewhere: what a checkpoint, a corpus, a bundle or a name may try, and that one line answers.

Each docstring says what a test injects and what must follow.
"""

import json
import os
import resource
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager.files import read_meta
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent
from nanochat.checkpoint_manager.resume import restore
from nanochat.checkpoint_manager.upstream import _tensors
from nanochat.common import UserError, base_dir, log, warn
from nanochat.data.corpora import resolve
from nanochat.data.shards import batches, read_about, read_column, write_shards
from nanochat.dataset import import_folder
from nanochat.evals.core import IclTask, read_bundle, read_problems
from nanochat.serve.cli.transcript import read_transcript
from nanochat.tokenizer import Tokenizer
from tasks import gsm8k
from tasks.customjson import CustomJSON
from tasks.published import load_table
from tests.support.tiny_model import tiny_tokenizer
from tests.support.tiny_training import CPU, make, save

DEEP = "[" * 200_000
ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """At most 8 GB more than now: what asks for more memory fails instead of taking the machine with it."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(action: Callable[[], Any]) -> str:
    """The message of the UserError that an action must end in: short, on one line, without control characters."""
    with pytest.raises(UserError) as mistake:
        action()
    text = str(mistake.value)
    assert len(text) < 1500 and text.isprintable(), text[:2000]
    return text


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.fixture
def step(base_folder: Path) -> Path:
    """The folder of a whole step of a tiny model, the only one."""
    save(checkpoint_dir("base", "d2"), 100, *make(), tiny_tokenizer())
    return checkpoint_dir("base", "d2") / "step_000100"


def load() -> None:
    load_model("base", "d2", 100, CPU)


def rewrite(step: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change meta.json, and give it and the files the hashes that belong to them, as an attacker would."""
    meta = read_meta(step.parent, 100)
    meta.pop("sha256")
    meta["files"] = {name: step_files.seal(step / name) for name in meta["files"]}
    change(meta)
    step_files.write_meta(step, meta)


WRONG: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"{name} of another type": (lambda meta, name=name: meta.update({name: [1]})) for name in step_files.NEEDED},
    **{f"no {name}": (lambda meta, name=name: meta.pop(name)) for name in step_files.NEEDED},
    "another format": lambda meta: meta.update(format=[[]]),
    "another family": lambda meta: meta.update(family=[ESCAPES]),
    "another step": lambda meta: meta.update(step=7),
    "a corpus that is a list": lambda meta: meta["config"].update(corpus=["x"]),
    "a state of other types": lambda meta: meta["state"].update(meter=3),
    "a figure in words": lambda meta: meta["state"].update(meter={"seconds": "many"}),
    "a norm in words": lambda meta: meta["state"].update(norms=[1.0, "many"]),
    "code that is a list": lambda meta: meta.update(made_with={"code": []}),
    "a file without a hash": lambda meta: meta["files"].update(x={}),
    "a size in words": lambda meta: meta["files"]["tokenizer.json"].update(bytes="many"),
    "a million layers": lambda meta: meta["model"].update(n_layer=1_000_000),
    "as many layers as are allowed": lambda meta: meta["model"].update(n_layer=1_000),
    "layers as a float": lambda meta: meta["model"].update(n_layer=2.0),
    "layers as a truth value": lambda meta: meta["model"].update(n_layer=True),
    "no layer": lambda meta: meta["model"].update(n_layer=0),
    "a long context": lambda meta: meta["model"].update(sequence_len=10**12),
    "a huge vocabulary": lambda meta: meta["model"].update(vocab_size=1 << 24),
    "wide layers": lambda meta: meta["model"].update(n_embd=96_000),
    "a window of another type": lambda meta: meta["model"].update(window_pattern=["L"]),
    "an unknown field": lambda meta: meta["model"].update({ESCAPES: 1}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_every_field_of_a_checkpoint_is_checked(wrong: str, step: Path) -> None:
    """T50. Injects: a meta.json with valid hashes whose fields are missing, have other types, or describe a million
    layers, a context of 10^12 tokens and other models that fit into no memory. Must follow: the file is refused in one
    line, before memory is allocated.

    注入：哈希正确的 meta.json，但其中的字段缺失、类型不对，或描述了一百万层、10^12 个词元的上下文等内存装不下的模型。
    必须：在占用内存之前用一行话拒绝。
    """
    rewrite(step, WRONG[wrong])
    refused(load)


def put_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def put_sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


OTHER_FILES: dict[str, Callable[[Path], Any]] = {
    "a pipe": put_fifo,
    "a device": put_device,
    "a file of 1 TB": put_sparse,
    "deep JSON": lambda path: path.write_text(DEEP),
    "a list": lambda path: path.write_text("[1]"),
    "a number": lambda path: path.write_text("1e999"),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("other", OTHER_FILES)
def test_a_description_that_is_no_ordinary_json_is_refused(other: str, step: Path, tmp_path: Path) -> None:
    """T51. Injects: pipes, /dev/zero, files of 1 TB, 200,000 nested lists and bytes in place of meta.json, corpus.json,
    tokenizer.json and a saved chat. Must follow: the file is refused in one line, and nothing hangs.

    注入：用管道、/dev/zero、1 TB 的文件、嵌套二十万层的列表和乱码字节代替 meta.json、corpus.json、tokenizer.json
    和保存的对话。必须：用一行话拒绝，不会卡住。
    """
    OTHER_FILES[other](step / "meta.json")
    refused(load)
    refused(lambda: read_meta(step.parent, 100))
    refused(lambda: find_parent("base", "d2", None))
    about = write_shards(base_dir() / "base_data" / "web", ["a", "b"]) and base_dir() / "base_data" / "web"
    OTHER_FILES[other](about / "corpus.json")
    refused(lambda: read_about(about))
    refused(lambda: list(batches(about / "shard_00000.parquet")))
    OTHER_FILES[other](step / "tokenizer.json")
    refused(lambda: Tokenizer.load(step))
    chat = tmp_path / "chat.json"
    chat.write_text("")
    OTHER_FILES[other](chat)
    refused(lambda: read_transcript(chat))


def test_files_of_a_checkpoint_are_regular_and_its_own(step: Path) -> None:
    """T52. Injects: a checkpoint whose model is a pipe or /dev/zero with 0 bytes, and a meta.json that names /dev/zero
    and a file above the folder. Must follow: the checkpoint is refused in one line that names the file.

    注入：检查点里的模型文件是管道或大小为 0 的 /dev/zero，meta.json 列出 /dev/zero 和上一级目录里的文件。
    必须：用一行话拒绝，并指出是哪个文件。
    """
    whole = (step / "meta.json").read_text()
    for name in ("/dev/zero", "../secret"):
        rewrite(step, lambda meta, name=name: meta["files"].update({name: {"bytes": 0, "sha256": "0" * 64}}))
        assert "outside its folder" in refused(load)
        (step / "meta.json").write_text(whole)
    for put in (put_fifo, put_device):
        put(step / "model.safetensors")
        assert "model.safetensors is not a regular file" in refused(load)


def header(path: Path, text: bytes, length: int | None = None, body: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def tensors(**about: Any) -> bytes:
    return json.dumps(about).encode()


MODELS: dict[str, Callable[[Path], Any]] = {
    "nothing": lambda path: path.write_bytes(b""),
    "a header of 2^63 bytes": lambda path: header(path, b"{}", 1 << 63),
    "a header of 90 MB": lambda path: header(path, b" " * 90_000_000),
    "a header that is not JSON": lambda path: header(path, b"x" * 64),
    "a deep header": lambda path: header(path, DEEP.encode()),
    "overlapping tensors": lambda path: header(
        path,
        tensors(
            a={"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            b={"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        ),
        body=bytes(12),
    ),
    "a tensor past the end": lambda path: header(
        path, tensors(a={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}), body=bytes(8)
    ),
    "an unknown format": lambda path: header(
        path, tensors(a={"dtype": "Q9", "shape": [1], "data_offsets": [0, 4]}), body=bytes(4)
    ),
    "whole numbers": lambda path: save_file({"wte.weight": torch.ones(4, dtype=torch.int64)}, path),
    "other tensors": lambda path: save_file({ESCAPES: torch.ones(4)}, path),
    "a pickle": lambda path: torch.save({"a": torch.ones(2)}, path),
}


@pytest.mark.parametrize("content", MODELS)
def test_a_model_file_that_is_no_model_is_refused(content: str, step: Path) -> None:
    """T53. Injects: safetensors files with headers of 2^63 bytes, of no JSON and of deep JSON, overlapping or missing
    tensors, unknown and integer formats, tensors of another model and a pickle, in place of model and optimizer. Must
    follow: the file is refused in one line.

    注入：用有问题的 safetensors 文件代替模型和优化器：文件头长 2^63 字节、不是 JSON 或嵌套过深，张量互相重叠或缺失，
    格式未知或是整数，张量属于别的模型，或者根本是 pickle。必须：用一行话拒绝。
    """
    MODELS[content](step / "model.safetensors")
    rewrite(step, lambda meta: None)
    refused(load)
    save(step.parent, 100, *make(), tiny_tokenizer())
    (state,) = step.glob("optim-*")
    MODELS[content](state)
    refused(lambda: restore(step.parent, 100, *make()))


def test_a_foreign_checkpoint_cannot_unfold_in_memory(tmp_path: Path) -> None:
    """T54. Injects: an upstream checkpoint of 1 kB with a tensor of 10^12 repeated numbers. Must follow: the file is
    refused in one line.

    注入：一个 1 kB 的上游检查点，里面有一个由 10^12 个重复数字组成的张量。必须：用一行话拒绝。
    """
    torch.save({"wte.weight": torch.zeros(1).expand(10**6, 10**6)}, tmp_path / "model.pt")
    assert os.path.getsize(tmp_path / "model.pt") < 2_000
    refused(lambda: _tensors(tmp_path / "model.pt"))


# --- data -----------------------------------------------------------------------------------------


def repeat(path: Path, text: str, rows: int, **columns: Any) -> None:
    """A parquet file that holds a text once and repeats it in every row."""
    values = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    table = pa.table({"text": values, **columns})
    pq.write_table(table, path, compression="zstd", store_schema=False)


def test_a_small_parquet_file_cannot_fill_the_memory(tmp_path: Path) -> None:
    """T55. Injects: parquet files of less than 1 kB that unpack to 8 GB, as a shard, as a user's file and as rows of a
    task, and a file of 4 MB that repeats one text 500 times. Must follow: the small files are refused in one line, and
    the large one is read with less than 1 GB of memory.

    注入：不到 1 kB、展开后 8 GB 的 parquet 文件，分别作为分片、自己的文件和任务的数据；以及一个 4 MB、
    把同一段文字重复 500 遍的文件。必须：前者用一行话拒绝，后者读取时占用内存不到 1 GB。
    """
    bomb = tmp_path / "test.parquet"
    repeat(bomb, "a" * (8 << 20), 1_000)
    assert bomb.stat().st_size < 1_000
    assert "no text packs that well" in refused(lambda: list(batches(bomb)))
    refused(lambda: import_folder(bomb, "own"))
    refused(lambda: load_table(gsm8k.source("test"), ("text",), tmp_path))
    long = tmp_path / "long.parquet"
    repeat(long, os.urandom(2 << 20).hex(), 500)
    code = (
        "import resource, sys; from pathlib import Path; from nanochat.data.shards import read_column\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "lists = [len(some) for some in read_column(Path(sys.argv[1]), 'text')]\n"
        "assert sum(lists) == 500 and max(lists) <= 4, lists\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(long)], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) < 1_000, (done.stdout, done.stderr)


def test_repeated_and_missing_texts_are_read_as_they_are(tmp_path: Path) -> None:
    """T55. Injects: a column with repeated texts and rows without text. Must follow: every row is read, in order.

    注入：一列里有重复的文字和没有文字的行。必须：按顺序读出每一行。
    """
    texts = ["a", None, "b", "a", "", "a"] * 700
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=1_900)
    assert [text for some in read_column(tmp_path / "a.parquet", "text") for text in some] == texts


ALIASES = "\n".join(
    ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
)


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, "{a: " * 30_000, ALIASES, "icl_tasks: 3", "- 1", "\x00", "icl_tasks: [[]]"],
    ids=["lists", "maps", "aliases", "a number", "a list", "NUL", "a task that is a list"],
)
def test_a_bundle_that_unfolds_is_refused(text: str, tmp_path: Path) -> None:
    """T56. Injects: a core.yaml with 50,000 nested lists, with aliases that unfold to 9^11 entries, and of other types;
    a pipe and /dev/zero in its place. Must follow: the file is refused in one line.

    注入：core.yaml 里嵌套五万层列表，或用别名展开成 9^11 项，或类型不对；或者用管道和 /dev/zero 代替它。
    必须：用一行话拒绝。
    """
    (tmp_path / "core.yaml").write_text(text)
    (tmp_path / "eval_meta_data.csv").write_text("Eval Task,Random baseline\n")
    refused(lambda: read_bundle(tmp_path))
    for put in (put_fifo, put_device):
        put(tmp_path / "core.yaml")
        refused(lambda: read_bundle(tmp_path))


@pytest.mark.parametrize(
    "line",
    [DEEP, '{"a":' * 100_000, "\udc80", "3", '{"text": ["x"]}', '{"messages": {"role": 1}}'],
    ids=["lists", "objects", "no UTF-8", "a number", "a text that is a list", "messages that are no list"],
)
def test_a_line_that_is_nested_too_deeply_is_named(line: str, tmp_path: Path) -> None:
    """T57. Injects: JSON lines with 200,000 nested lists, bytes that are not UTF-8 and values of other types, as a
    user's texts, a user's conversations and problems of CORE. Must follow: the file is refused in one line that names
    the file and the line.

    注入：JSON 行里嵌套二十万层列表，含有不是 UTF-8 的字节或类型不对的值，分别作为自己的文本、自己的对话和 CORE 的题目。
    必须：用一行话拒绝，并指出文件和行号。
    """
    path = tmp_path / "x.jsonl"
    path.write_bytes(line.encode(errors="surrogateescape") + b"\n")
    assert "x.jsonl" in refused(lambda: import_folder(path, "own"))
    assert "line 1" in refused(lambda: CustomJSON(path))
    task = IclTask("t", "multiple_choice", path, 0, " ", 0.25)
    assert "line 1" in refused(lambda: read_problems(task))


# --- names ----------------------------------------------------------------------------------------


def test_names_and_reasons_cannot_control_the_terminal(
    base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """T58. Injects: terminal escapes, a bell, marks that turn the direction of text, and bytes that are not UTF-8 in
    the names of a corpus, a file and a checkpoint, and in the reason of a refusal. Must follow: messages, warnings and
    the log show them as \\\\x1b and the like, and a terminal obeys none of them.

    注入：语料、文件和检查点的名字里，以及拒绝的理由里，含有终端控制序列、响铃、改变文字方向的记号和不是 UTF-8 的字节。
    必须：报错、警告和日志都把它们显示成 \\\\x1b 之类，终端不会执行。
    """
    name = ESCAPES + os.fsdecode(b"\xff")
    assert r"\x1b]0;owned\x07" in refused(lambda: resolve(name))
    (tmp_path / name).mkdir()
    (tmp_path / name / "a.txt").write_text("a")
    assert "--name" in refused(lambda: import_folder(tmp_path / name))
    (tmp_path / f"{name}.jsonl").write_text(f'{{"text": 1, "{ESCAPES[:4]}": 2}}\n')
    assert r"\x1b" in refused(lambda: import_folder(tmp_path / f"{name}.jsonl", "own"))
    write_shards(base_folder / "base_data" / ESCAPES, ["a", "b"])
    write_shards(base_folder / "base_data" / "other", ["a", "b"])
    assert r"\x1b" in refused(lambda: resolve(None))
    log(f"{name}: made")
    warn(f"{name}: damaged")
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable() and r"\x1b[2J" in out and r"\u202e" in err


def test_the_edge_of_every_script_prints_no_escape(tmp_path: Path) -> None:
    """T58. Injects: a command line that names a corpus with terminal escapes. Must follow: exit code 2 and one message
    without the escapes.

    注入：命令行里的语料名含有终端控制序列。必须：以退出码 2 结束，只有一条消息，其中没有控制序列。
    """
    command = [sys.executable, "-m", "nanochat.dataset", "--data", ESCAPES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("error:") == 1
    assert done.stderr.replace("\n", "").isprintable(), done.stderr
