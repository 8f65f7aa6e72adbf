"""What `auto` means, by depth, corpus, device and memory."""

import contextlib
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanochat import device
from nanochat.checkpoint_manager.resume import Start
from nanochat.common import UserError
from nanochat.device import Compute
from nanochat.gpt import GPTConfig
from nanochat.platforms.cpu.platform import Cpu
from nanochat.platforms.nvidia.platform import Nvidia
from nanochat.runtime.parallel import Sharding
from nanochat.train import sizes
from nanochat.train.flags import BatchFlags, ExampleFlags, ShapeFlags
from nanochat.train.sizes import Batch
from tests.support.tiny_model import on_cpu, pretend

CPU = on_cpu()
CUDA = pretend(Nvidia())
SHAPE = GPTConfig(256, 2048, 4, 4, 4, 256)
UNKNOWN = "x"  # a corpus without traits


def shape(depth: int = 4, compute: Compute = CPU, corpus: str = "tinyworld", **given: int) -> GPTConfig:
    return sizes.model_config(ShapeFlags(depth, **given), 2048, corpus, compute)


@pytest.mark.parametrize(
    ("depth", "dim", "heads"),
    [(1, 64, 1), (4, 256, 4), (7, 448, 7), (8, 512, 4), (9, 640, 5), (12, 768, 6), (20, 1280, 10)],
)
def test_depth_alone_gives_64_channels_a_layer_in_whole_heads(depth: int, dim: int, heads: int) -> None:
    config = shape(depth)
    assert (config.n_layer, config.n_embd, config.n_head, config.n_kv_head) == (depth, dim, heads, heads)


def test_overrides_are_taken() -> None:
    config = shape(4, model_dim=192, head_dim=48, max_seq_len=100)
    assert (config.n_embd, config.n_head, config.head_dim, config.sequence_len) == (192, 4, 48, 100)
    assert shape(4, head_dim=128).n_head == 2
    assert (config.vocab_size, config.window_pattern) == (2048, "SSSL")
    assert shape(4, bigram_rows=99).bigram_rows == 99 and shape(4, bigram_rows=0).bigram_rows == 0
    assert config.offset_layers == 4 and shape(4, offset_layers=1).offset_layers == 1


@pytest.mark.parametrize(("vocabulary", "rows"), [(2048, 65_536), (4096, 131_072), (65_536, 131_072)])
def test_bigrams_follow_the_vocabulary_and_how_often_the_text_is_read(
    vocabulary: int, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = sizes.model_config(ShapeFlags(4), vocabulary, "fineweb", CPU)
    assert config.bigram_rows == rows
    assert sizes.keep_bigrams(config, "auto", 2.0) == config
    assert f"bigram_rows: {rows:,} (the text is read 2.00 times)" in capsys.readouterr().out
    assert sizes.keep_bigrams(config, "auto", 2.01) == replace(config, bigram_rows=0)
    assert sizes.keep_bigrams(config, rows, 99.0) == config  # asked for


def test_a_corpus_of_few_facts_gets_no_bigrams_unless_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    config = shape(4, corpus="tinyworld")
    assert config.bigram_rows == 0 and sizes.keep_bigrams(config, "auto", 1.0) is config
    assert capsys.readouterr().out.count("bigram_rows: 0 (they teach little about tinyworld)") == 1
    assert shape(4, corpus="tinyworld", bigram_rows=99).bigram_rows == 99


def test_bigrams_that_cannot_be_are_refused_and_a_qwen3_has_none() -> None:
    with pytest.raises(UserError, match="bigram_rows must be at least 0, got -1"):
        shape(4, bigram_rows=-1)
    qwen3 = ShapeFlags(4, window_pattern="L", family="qwen3")
    config = sizes.model_config(qwen3, 2048, "tinyworld", CPU)
    assert sizes.keep_bigrams(config, "auto", 1.0) is config
    with pytest.raises(UserError, match="--bigram_rows=9"):
        sizes.model_config(replace(qwen3, bigram_rows=9), 2048, "tinyworld", CPU)


@pytest.mark.parametrize(
    ("corpus", "compute", "length"),
    [("tinyworld", CPU, 256), ("tinyworld", CUDA, 256), ("fineweb", CPU, 512), ("fineweb", CUDA, 2048)],
)
def test_the_context_follows_corpus_and_device_and_is_logged(
    corpus: str, compute: Compute, length: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shape(corpus=corpus, compute=compute).sequence_len == length
    assert f"max_seq_len: {length} (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"model_dim": -64}, "model_dim must be at least 1, got -64"),
        ({"max_seq_len": 0}, "max_seq_len must be at least 1, got 0"),
        ({"model_dim": 200}, "model_dim must be a multiple of head_dim, got 200 and 64"),
        ({"model_dim": 16, "head_dim": 16}, "n_embd must be at least 24"),
    ],
)
def test_impossible_shapes_are_refused(given: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        shape(**given)


def test_what_is_automatic_stays_as_the_run_began() -> None:
    assert sizes.model_config(ShapeFlags(4), 2048, UNKNOWN, CUDA).sequence_len == 2048
    assert shape(4).exclusive_layers == 4 and shape(4, exclusive_layers=1).exclusive_layers == 1
    of_an_earlier_version = {"sequence_len": 512, "n_layer": 4}
    config = sizes.model_config(ShapeFlags(4), 2048, UNKNOWN, CUDA, of_an_earlier_version)
    assert isinstance(config, GPTConfig)
    assert config.sequence_len == 512 and config.exclusive_layers == 0
    begun = {**of_an_earlier_version, "exclusive_layers": 2}
    config = sizes.model_config(ShapeFlags(4), 2048, UNKNOWN, CUDA, begun)
    assert isinstance(config, GPTConfig) and config.exclusive_layers == 2


def split(total: Any, rows: Any, compute: Compute = CPU, passes: int | None = None, begun: int | None = None) -> Batch:
    return sizes.batch(BatchFlags(total, rows, passes), SHAPE, 10**6, UNKNOWN, compute, begun_rows=begun)


def test_a_step_as_given_and_a_lowered_device_batch_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert split(8192, 8, CPU) == Batch(8192, 32, 8, 4, probe=False)
    assert "lowered" not in capsys.readouterr().out
    assert split(8192, 8, replace(CPU, world_size=8)) == Batch(8192, 32, 4, 1)
    assert "device_batch_size: lowered from 8 to 4" in capsys.readouterr().out


def test_an_automatic_step_suits_the_ranks_and_stays_as_the_run_began() -> None:
    rows: Any = namedtuple("Rows", "count conversations")(31, 108)

    def rows_per_step(ranks: int, begun: int | None = None) -> int:
        compute = replace(CPU, world_size=ranks)
        return sizes.example_batch(ExampleFlags("auto"), SHAPE, 10**6, rows, UNKNOWN, compute, begun).rows_per_step

    assert [rows_per_step(ranks) for ranks in (1, 2, 8)] == [1, 2, 8]
    assert rows_per_step(1, begun=8) == rows_per_step(4, begun=8) == 8
    three = replace(CPU, world_size=3)
    assert split("auto", 2, three, begun=48).rows_per_step == 48
    assert split(256 * 6, 2, three, begun=48).rows_per_step == 6
    for refused in (
        lambda: rows_per_step(3, begun=8),
        lambda: split("auto", 2, three, begun=8),
    ):
        with pytest.raises(UserError, match=r"8 rows, which 3 devices cannot .*--resume=none"):
            refused()


@pytest.mark.parametrize(("asked", "passes"), [("auto", 1), ("auto", 2), ("auto", 4), ("auto", 32), (8, 4), (64, 1)])
def test_passes_that_agree_are_taken_and_an_automatic_pass_follows_from_them(asked: Any, passes: int) -> None:
    batch = split(8192, asked, CUDA, passes)
    assert batch == Batch(8192, 32, 32 // passes, passes, probe=False)


@pytest.mark.parametrize(
    ("asked", "passes", "world_size", "named"),
    [
        (8, 2, 1, r"\(8 x 256\) = 4, .*got 2\. .*--device_batch_size=16"),
        (4, 3, 2, r"\(4 x 512\) = 4, .* x 2 rank\(s\); got 3\. .*--total_batch_size=6144"),
        (64, 2, 1, r"\(32 x 256\) = 1, .* got 2\. .*--device_batch_size=16"),
        ("auto", 3, 1, r"got 3\. .*--total_batch_size=6144"),
        ("auto", 100, 1, r"\(1 x 256\) = 32, .* got 100\. .*--total_batch_size=25600"),
        ("auto", 0, 1, r"got 0\. Leave it out\."),
    ],
)
def test_passes_that_do_not_agree_are_refused_with_the_arithmetic(
    asked: Any, passes: int, world_size: int, named: str
) -> None:
    compute = replace(CUDA, world_size=world_size)
    with pytest.raises(UserError, match=f"gradient_accumulation_steps .*{named}") as refused:
        split(8192, asked, compute, passes)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("corpus", "tokens", "world_size", "expected"),
    [
        ("tinyworld", 1e9, 1, 8192),
        ("tinyworld", 1e9, 3, 8448),  # 11 times 3 rows of 256 is nearest to 8,192
        ("tinyworld", 1e9, 64, 16384),  # a row for each rank
        ("fineweb", None, 1, 2**19),
        ("fineweb", 12 * 110_100_480, 1, 2**19),
        ("fineweb", 12 * 110_100_480 * 4, 1, 2**20),
    ],
)
def test_an_automatic_step_follows_corpus_and_horizon(
    corpus: str, tokens: float | None, world_size: int, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    got = sizes.batch(BatchFlags(), SHAPE, 10**6, corpus, replace(CPU, world_size=world_size), tokens)
    assert got.tokens_per_step == expected
    assert got.device_batch_size * got.passes * world_size * 256 == expected
    assert f"total_batch_size: {expected:,} tokens a step" in capsys.readouterr().out


def test_a_pass_on_a_cpu_is_4096_tokens() -> None:
    assert split(2**16, "auto", CPU) == Batch(2**16, 256, 16, 16, probe=False)
    long = replace(SHAPE, sequence_len=8192)
    assert sizes.batch(BatchFlags(2**16), long, 10**6, UNKNOWN, CPU).device_batch_size == 1


def test_a_pass_on_a_device_fits_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """d20 at 2,048 in 80 GiB: 0.8 x 80 GiB less 16 bytes a parameter, over 40 bytes per token, channel and layer."""
    d20 = GPTConfig(2048, 32768, 20, 10, 10, 1280)
    fit = (0.8 * 80 * 2**30 - 16 * 896_500_000) / (40 * 20 * 1280 * 2048)
    assert 16 < fit < 32
    for memory, expected in ((80, 16), (8, 1)):
        monkeypatch.setattr(Nvidia, "memory_total", lambda self, memory=memory: memory * 2**30)
        batch = sizes.batch(BatchFlags(2**19), d20, 896_500_000, UNKNOWN, CUDA)
        assert (batch.device_batch_size, batch.probe) == (expected, True)


# --- memory --------------------------------------------------------------------------------------


def test_a_depth_too_large_for_memory_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cpu, "memory_total", lambda self: 24 * 2**30)
    sizes.check_fits(4, 2 * 2**30, "grad", CPU)  # 12 bytes each fill it
    with pytest.raises(UserError, match=r"depth 40 makes 2,147,483,649 parameters, .* 24 GiB .* --depth") as no:
        sizes.check_fits(40, 2 * 2**30 + 1, "grad", CPU)
    assert no.value.exit_code == 2


@pytest.mark.parametrize(
    ("kind", "mode", "ranks", "fits"),
    [("cuda", "grad", 4, True), ("cuda", "full", 4, True), ("cuda", "none", 4, False), ("cuda", "grad", 2, False),
     ("cpu", "grad", 4, False), ("cpu", "none", 1, False)],
)  # fmt: skip
def test_sharding_makes_room_on_devices_but_not_on_one_host(
    kind: str, mode: Sharding, ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    platform = device.PLATFORMS[kind]
    monkeypatch.setattr(platform, "memory_total", lambda self: 12 * 2**30)
    monkeypatch.setattr(platform, "memory_reachable", lambda self: 12 * 2**30)
    compute = pretend(platform(), world_size=ranks)
    if fits:
        sizes.check_fits(40, 3 * 2**30, mode, compute)
        return
    with pytest.raises(UserError, match="depth 40"):
        sizes.check_fits(40, 3 * 2**30, mode, compute)


def test_a_card_whose_memory_others_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvidia, "memory_total", lambda self: 80 * 2**30)
    monkeypatch.setattr(Nvidia, "memory_reachable", lambda self: 3 * 2**30)
    with pytest.raises(UserError, match=r"at least 12.0 GiB of each device, but only 3.0 of 80.0 GiB are free"):
        sizes.check_fits(20, 2**30, "none", CUDA)
    sizes.check_fits(4, 2**28, "none", CUDA)


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("free", "keep", "says"),
    [(23e6, 3, "refused"), (25e6, 3, "a warning"), (47e6, 3, "a warning"), (49e6, 3, ""), (25e6, 0, ""), (25e6, 1, "")],
)
def test_the_disk_is_checked_before_the_first_step(
    free: float, keep: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e9, 1e9 - free, free))
    if says == "refused":
        with pytest.raises(UserError, match=r"takes up to 12.1 MB, .* has 23.0 MB free.*NANOCHAT_BASE_DIR"):
            sizes.check_disk(tmp_path, 1_000_000, 12e6, keep)
        return
    sizes.check_disk(tmp_path, 1_000_000, 12e6, keep)
    assert ("will take up to 48.5 MB" in capsys.readouterr().err) == (says == "a warning")


@pytest.mark.parametrize(
    ("free", "resume", "fits"),
    [(13_000, "auto", True), (11_000, "auto", False), (13_000, 10, True), (13_000, 5, False), (23_000, "none", False)],
)
def test_checkpoints_that_a_run_replaces_count_as_held(
    free: int, resume: Start, fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step_000010", "set-aside-20261130-000000/step_000020"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "model.safetensors").write_bytes(b"\0" * 12_120)
        (tmp_path / name / "meta.json").write_text("{}")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e9, 1e9, free))
    with contextlib.nullcontext() if fits else pytest.raises(UserError, match="must be free"):
        sizes.check_disk(tmp_path, 1_000, 12_000, 1, resume)


def test_a_run_that_is_long_or_repeats_its_data_often_gets_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    sizes.warn_of_time(3_599, "base", CPU)
    sizes.warn_of_time(216_000, "base", CUDA)
    assert not capsys.readouterr().err
    sizes.warn_of_time(216_000, "base", CPU)
    said = capsys.readouterr().err
    assert "2 d 12 h" in said and "--num_iterations, or a smaller --depth" in said
    sizes.warn_of_time(216_000, "sft", CPU)
    said = capsys.readouterr().err
    assert "--num_iterations" in said and "--depth" not in said, "SFT has no such flag"
    sizes.tell_epochs("mine", rows=1000, row_tokens=64, steps=400, rows_per_step=10)
    said = capsys.readouterr()
    assert said.out == "data: mine, 1,000 rows of 64 tokens, 4.00 epochs\n" and not said.err
    sizes.tell_epochs("mine", rows=1000, row_tokens=64, steps=872_600, rows_per_step=10)
    said = capsys.readouterr().err
    assert "reads all of its data 8,726 times" in said and "--num_iterations=400" in said
    sizes.tell_epochs("mine", rows=3, row_tokens=64, steps=10, rows_per_step=16)
    assert "--num_iterations=1" in capsys.readouterr().err
