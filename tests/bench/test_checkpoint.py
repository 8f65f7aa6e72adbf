"""The benchmark of checkpoints, on small tensors: every writer writes everything, and it prints its figures."""

import gc
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench import checkpoint
from nanochat.checkpoint_manager import files as step_files
from nanochat.gpt import GPTConfig
from tests.support.tiny_model import on_cpu

SMALL = GPTConfig(sequence_len=16, vocab_size=300, n_layer=2, n_head=2, n_kv_head=2, n_embd=32)


def test_every_writer_writes_all_the_bytes(tmp_path: Path) -> None:
    held = checkpoint.Run(SMALL, on_cpu())
    tensors = held.tensors()
    for _ in range(2):  # twice, because the rounds replace files
        for write in checkpoint.THEIRS.values():
            write(tensors, tmp_path)
        held.save(tmp_path / "run")
    assert (tmp_path / "raw").read_bytes() == b"".join(t.numpy().tobytes() for t in tensors.values())
    assert step_files.verify(tmp_path / "run" / "step_000001") == ""
    ours = {
        name: value for path in (tmp_path / "run").glob("*/*.safetensors") for name, value in load_file(path).items()
    }
    theirs = load_file(tmp_path / "theirs.safetensors")
    for found in (ours, theirs, torch.load(tmp_path / "theirs.pt")):
        assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_the_peak_is_what_was_held_meanwhile() -> None:
    gc.collect()  # what other tests left would be freed in between, and the loop would never end
    with checkpoint.Peak() as peak:
        held = bytearray(96 << 20)
        held[::4096] = b"x" * len(held[::4096])
        while peak.extra < 60 << 20:
            pass
        del held
    assert 60 << 20 <= peak.extra < 200 << 20


@pytest.mark.ranks
def test_it_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checkpoint, "QUICK", SMALL)
    monkeypatch.setattr(checkpoint, "extra_tensors", lambda folder: 0.5)
    checkpoint.main(checkpoint.Config(quick=True))
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert result["benchmark"] == "checkpoint" and result["ours_of_raw"] > 0
    assert [line.split()[0] for line in lines[2:6]] == [*checkpoint.THEIRS, "ours"]
