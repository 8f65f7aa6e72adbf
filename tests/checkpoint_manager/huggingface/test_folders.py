"""Folders of published models as people have them: caches, pointers of git-lfs, weights in pickle."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanochat.checkpoint_manager.huggingface.adapter import SETTINGS, read_adapter
from nanochat.checkpoint_manager.huggingface.folders import model_name, published_folder
from nanochat.checkpoint_manager.huggingface.peft_settings import read_settings
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.checkpoint_manager.load import load_published
from nanochat.common import UserError
from tests.support.qwens import VOCABULARY, tiny_qwen, write_folder
from tests.support.tiny_model import on_cpu

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without caches."""
    for variable in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "MODELSCOPE_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def cached_by_hf(cache: Path, marker: str = "config.json") -> Path:
    """A model in a cache of Hugging Face with two snapshots; main is the older one."""
    repository = cache / "models--Qwen--Qwen3-0.6B"
    for commit in ("abc", "def"):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / marker).touch()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    return repository


@pytest.mark.parametrize(
    ("variable", "value", "cache"),
    [
        ("", "", "home/.cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "xdg", "xdg/huggingface/hub"),
        ("HF_HOME", "hf", "hf/hub"),
        ("HF_HUB_CACHE", "elsewhere", "elsewhere"),
    ],
)
def test_a_name_is_found_in_the_cache_of_hugging_face(
    variable: str, value: str, cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = cached_by_hf(tmp_path / cache)
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / value))
    folder = published_folder(Path("Qwen/Qwen3-0.6B"))
    assert folder == repository / "snapshots" / "abc"
    assert published_folder(repository) == folder
    assert published_folder(folder) == folder
    assert model_name(folder) == "Qwen/Qwen3-0.6B"


def test_without_main_the_newest_whole_snapshot_counts(home: Path) -> None:
    repository = cached_by_hf(home / ".cache/huggingface/hub", SETTINGS)
    (repository / "refs" / "main").write_text("gone")
    (repository / "snapshots" / "0").mkdir()
    assert published_folder(Path("Qwen/Qwen3-0.6B"), SETTINGS).name in ("abc", "def")


@pytest.mark.parametrize(
    "place", ["hub/models/Qwen/Qwen2___5-0___5B", "models/Qwen/Qwen2.5-0.5B", "hub/Qwen/Qwen2___5-0___5B"]
)
def test_a_name_is_found_in_the_cache_of_modelscope(place: str, home: Path) -> None:
    folder = home / ".cache/modelscope" / place
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    assert published_folder(Path("Qwen/Qwen2.5-0.5B")) == folder
    assert model_name(folder) == "Qwen2.5-0.5B"


def test_a_folder_comes_before_the_caches(tmp_path: Path, home: Path) -> None:
    cached_by_hf(home / ".cache/huggingface/hub")
    (tmp_path / "Qwen" / "Qwen3-0.6B").mkdir(parents=True)
    assert published_folder(Path("Qwen/Qwen3-0.6B")) == tmp_path / "Qwen" / "Qwen3-0.6B"


def test_a_name_that_nobody_has_says_how_to_download_it() -> None:
    with pytest.raises(UserError) as refused:
        load_published(Path("Qwen/Qwen3-0.6B"), None, on_cpu())
    assert refused.value.exit_code == 2
    for command in ("hf download Qwen/Qwen3-0.6B", "modelscope download --model Qwen/Qwen3-0.6B"):
        assert command in str(refused.value)
    assert published_folder(Path("./no-name")).name == "no-name"


def test_an_adapter_that_is_named_as_a_model_says_which_flag_is_meant(tmp_path: Path) -> None:
    (tmp_path / SETTINGS).touch()
    with pytest.raises(UserError, match="--adapter") as refused:
        load_published(tmp_path, None, on_cpu())
    assert refused.value.exit_code == 2
    assert published_folder(tmp_path, SETTINGS) == tmp_path


@pytest.mark.parametrize("is_named", [True, False])
def test_a_cached_adapter_and_model_are_told_apart(is_named: bool, home: Path) -> None:
    """By OWNER/NAME and by the folder of the repository; a name said to download what was there."""
    repository = cached_by_hf(home / ".cache/huggingface/hub", SETTINGS)
    path = Path("Qwen/Qwen3-0.6B") if is_named else repository
    with pytest.raises(UserError, match=r"snapshots/abc is an adapter: name it with --adapter") as refused:
        published_folder(path)
    assert refused.value.exit_code == 2
    for commit in ("abc", "def"):
        (repository / "snapshots" / commit / SETTINGS).rename(repository / "snapshots" / commit / "config.json")
    with pytest.raises(UserError, match="snapshots/abc is not an adapter"):
        read_settings(published_folder(path, SETTINGS))


def test_a_cached_model_loads_under_its_name(home: Path) -> None:
    snapshot = cached_by_hf(home / ".cache/huggingface/hub") / "snapshots" / "abc"
    write_folder(snapshot, "qwen3")
    assert load_published(Path("Qwen/Qwen3-0.6B"), None, on_cpu()).tag == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "tokenizer.json", "adapter_model.safetensors"])
def test_a_pointer_of_git_lfs_is_told(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3")
    (tmp_path / SETTINGS).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError) as refused:
        load_qwen(tmp_path, on_cpu())
        FolderTokenizer(tmp_path, VOCABULARY)
        read_adapter(tiny_qwen("qwen3"), tmp_path)
    assert name in str(refused.value) and "git lfs pull" in str(refused.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pth"])
def test_weights_in_pickle_are_not_loaded(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, "qwen3")
    for path in tmp_path.glob("model*"):
        path.unlink()
    torch.save({"harmful": torch.ones(1)}, tmp_path / name)
    with pytest.raises(UserError) as refused:
        load_qwen(tmp_path, on_cpu())
    assert name in str(refused.value) and "save_pretrained" in str(refused.value)


@pytest.mark.slow
def test_the_command_for_an_adapter_in_pickle_converts_it(tmp_path: Path) -> None:
    folder = tmp_path / "an 'adapter'"
    folder.mkdir()
    (folder / SETTINGS).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    torch.save({"a": torch.ones(2)}, folder / "adapter_model.bin")
    with pytest.raises(UserError) as refused:
        read_adapter(tiny_qwen("qwen3"), folder)
    command = shlex.split(str(refused.value).split("`")[1])
    subprocess.run([sys.executable, *command[1:]], check=True)
    assert load_file(folder / "adapter_model.safetensors")["a"].tolist() == [1, 1]
