"""The series of models: its flags, its points by hand, and a quick run beside the user's files."""

import json
from pathlib import Path

import pytest

from nanochat.common import UserError, write_json
from runs import miniseries
from runs.miniseries import Config, Point
from tests.support.small_world import files, make_corpus

ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE = {"sequence_len": 16, "vocab_size": 320, "n_layer": 1, "n_head": 1, "n_kv_head": 1, "n_embd": 32,
         "window_pattern": "L"}  # fmt: skip


def test_a_run_s_flops_are_those_of_its_tokens(tmp_path: Path) -> None:
    """Steps have 256 tokens; a token costs 6 FLOPs per entry of matrices, head and gates, and 12 C per key."""
    write_json(tmp_path / "step_000004" / "meta.json", {"model": SHAPE})
    write_json(tmp_path / "step_000002" / "meta.json", {"model": {}})
    lines = [
        {"step": 1, "tokens_per_second": 512.0, "seconds": 0.5, "total_seconds": 0.5},
        {"step": 2, "tokens_per_second": 256.0, "seconds": 1.0, "total_seconds": 1.5, "val_bpb": 2.0},
        {"step": 4, "tokens_per_second": 256.0, "seconds": 1.0, "total_seconds": 3.5, "val_bpb": 1.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = miniseries.measured(tmp_path, 1)
    a_token = 6 * (12 * 32**2 + 320 * 32 + 24 + 12) + 12 * 32 * 16
    assert run.points == [Point(2 * 256 * a_token, 2.0), Point(4 * 256 * a_token, 1.5)]
    assert (run.depth, run.seconds) == (1, 3.5)
    assert run.parameters == 12 * 32**2 + 3 * 320 * 32 + 24 + 12 + 1 + 1 + 2


def test_a_cpu_sees_fewer_tokens_unless_told() -> None:
    def ratio(cfg: Config, on_cpu: bool) -> list[str]:
        return [flag for flag in miniseries.flags(4, "tinyworld", cfg, on_cpu) if "ratio" in flag]

    assert ratio(Config(), on_cpu=True) == ["--target_param_data_ratio=1"]
    assert ratio(Config(), on_cpu=False) == []
    assert ratio(Config(target_param_data_ratio=2.5), on_cpu=True) == ["--target_param_data_ratio=2.5"]


@pytest.mark.parametrize("depths", [(0, 2), (2, 2)])
def test_depths_that_are_no_series_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="--depths must be different numbers of at least 1, got") as refused:
        miniseries.main(Config(depths=depths))
    assert refused.value.exit_code == 2


def test_the_number_of_processes_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC_PER_NODE", "3")
    assert miniseries.processes() == 3
    monkeypatch.setenv("NPROC_PER_NODE", "all")
    with pytest.raises(UserError, match="NPROC_PER_NODE must be the number of processes, 1 or more, got all"):
        miniseries.processes()


@pytest.mark.smoke
def test_a_quick_series_draws_its_picture_and_changes_none_of_the_user_s_files(
    base_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_corpus(base_folder)
    before = files(base_folder)
    for depths in ((1,), (1, 2)):  # the second run has only depth 2 left to train
        miniseries.main(Config(quick=True, depths=depths))
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert tuple(run["depth"] for run in found["runs"]) == depths
        assert all(len(run["points"]) == 3 for run in found["runs"])
        assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    after = files(base_folder)
    assert after.items() >= before.items()
    assert not [name for name in after if name.startswith(("base_checkpoints", "report"))]
