"""Compute multipliers: the arithmetic on power laws, saved runs, refusals, a comparison."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.multiplier import __main__ as bench
from bench.multiplier import runs as running
from bench.multiplier.__main__ import Config, Sizes
from bench.multiplier.curves import Point, cost_to_reach, improving, interval, multiplier
from bench.multiplier.runs import Entry, Result, Run, Runs
from bench.processes import ROOT
from bench.train.side import upstream_factors
from bench.train.variants import Variant, training
from nanochat.common import UserError
from tests.bench.fakes import TEXT, TINY, fake_upstream, tiny_plan
from tests.bench.fakes import UPSTREAM as SOURCE

EAGER = Variant("ours", "float32")
OURS = Entry("ours", EAGER)
UPSTREAM = Entry("upstream", replace(EAGER, side="upstream"))


def law(cost: float, faster: float = 1.0) -> Point:
    """A power law that reaches every loss for `faster` times less."""
    return Point(cost, 3.0 * (cost * faster) ** -0.2)


@pytest.mark.parametrize(
    ("points", "mean", "extrapolated"),
    [
        ([law(1.3e9, 1.7), law(2e9, 1.7)], 1.7, False),
        ([law(2e9, 0.8)], 0.8, False),
        ([law(4e9, 3.0)], 3.0, True),
        ([law(1e9, 0.5)], 0.5, True),
    ],
)
def test_the_multiplier_of_a_power_law_is_the_known_one(
    points: list[Point],
    mean: float,
    extrapolated: bool,
) -> None:
    curve = [law(cost) for cost in (4e9, 1e9, 2e9)]
    result = multiplier(points, [curve] * len(points))
    assert result is not None
    assert result.mean == pytest.approx(mean)
    assert result.extrapolated == extrapolated == ("?" in result.words)


def test_a_longer_run_that_is_no_better_is_left_out() -> None:
    points = [Point(4.0, 1.6), Point(1.0, 2.0), Point(2.0, 2.1), Point(3.0, 2.0)]
    assert improving(points) == [Point(1.0, 2.0), Point(4.0, 1.6)]
    assert cost_to_reach([Point(1.0, 2.0), Point(2.0, 2.0)], 1.9) is None
    assert multiplier([Point(1.0, 1.9)], [[Point(1.0, 2.0), Point(2.0, 2.1)]]) is None


def test_the_interval_is_student_s_over_the_logarithms() -> None:
    result = interval([1.0, math.exp(0.1), math.exp(0.2)], False)
    error = 0.1 / math.sqrt(3)
    ends = (math.exp(0.1 - 4.303 * error), math.exp(0.1 + 4.303 * error))
    assert result.mean == pytest.approx(math.exp(0.1))
    assert result.error == pytest.approx(math.exp(0.1) * error)
    assert (result.low, result.high) == pytest.approx(ends)
    alone = interval([1.5], True)
    assert (alone.error, alone.low, alone.words) == (None, None, "1.500?")


class FakeRuns(Runs):
    """Trains by a made-up law instead of in a process; upstream spends 1.2 times as much."""

    def __init__(self, folder: Path, upstream: Path | None = None):
        super().__init__(folder, upstream)
        self.requests: list[Run] = []

    def train(self, run: Run) -> Result:
        self.requests.append(run)
        bits = law(run.flops).bits_per_byte
        if run.entry.variant.side == "upstream":
            bits = law(run.flops / 1.2).bits_per_byte
        return Result({"seed": run.plan.seed}, run.flops, run.flops / 1e9, bits, [])


def run_in(folder: Path, entry: Entry = OURS, **settings: Any) -> Run:
    plan = tiny_plan(folder, warmup=0, horizon=6, seed=1)
    return Run("code", 2, entry, replace(plan, **settings))


def test_a_finished_run_is_never_trained_again_and_a_changed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path / "rows")
    first = FakeRuns(tmp_path / "runs")(run)
    again = FakeRuns(tmp_path / "runs")
    assert again(run) == first
    assert again.requests == []
    changes = [
        replace(run, plan=replace(run.plan, seed=2)),
        replace(run, plan=replace(run.plan, horizon=7)),
        replace(run, entry=Entry("ours", replace(EAGER, flags=("--matrix_lr=0.03",)))),
        replace(run, entry=Entry("ours", replace(EAGER, dtype="bfloat16"))),
    ]
    for changed in changes:
        again(changed)
    assert again.requests == changes
    monkeypatch.setenv("NANOCHAT_KERNELS", "plain")
    again(run)
    assert again.requests[-1] == run


def test_code_is_among_the_settings_of_the_side_that_runs_it(tmp_path: Path) -> None:
    upstream = fake_upstream(tmp_path / "upstream")
    checkout = fake_upstream(tmp_path / "own")
    for name in running.OUR_CODE[1:]:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).touch()
    theirs = run_in(tmp_path / "rows", UPSTREAM)
    changed = run_in(tmp_path / "rows", Entry("ours", replace(EAGER, checkout=checkout)))

    def settings() -> list[dict[str, Any]]:
        return [running.settings_of(run, upstream) for run in (theirs, changed)]

    before = settings()
    (checkout / "nanochat" / "gpt.py").write_text("X = 1\n")
    after = settings()
    assert after[0] == before[0]
    assert after[1] != before[1]
    (upstream / "nanochat" / "common.py").write_text("X = 1\n")
    assert settings()[0] != before[0]


def test_the_comparison_finds_the_multiplier_of_its_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = FakeRuns(tmp_path / "runs", fake_upstream(tmp_path / "upstream"))
    template = run_in(tmp_path / "rows")
    (figure,) = bench.measure(template, UPSTREAM, [OURS], Config(steps=(6,)), runs)
    for interval_of_seeds in (figure.flops, figure.seconds):
        assert interval_of_seeds is not None
        assert interval_of_seeds.mean == pytest.approx(1.2, abs=0.002)
    assert figure.bits_per_byte < figure.baseline
    assert [run.plan.seed for run in runs.requests if run.entry == OURS] == [1, 2, 3]
    assert {run.entry.variant.scale for run in runs.requests if run.entry.name != "ours"} == {2.0}
    bench.show([figure], "upstream")
    assert "code, d2, 6" in capsys.readouterr().out


def test_variants_are_flags_of_base_train_or_another_checkout() -> None:
    words = f"hot=--matrix-lr=0.03  --warmup_steps=5 --checkout={ROOT}"
    hot = bench.entry(words, EAGER).variant
    assert hot.flags == ("--matrix_lr=0.03", "--warmup_steps=5")
    assert hot.checkout == ROOT
    cfg = Config(upstream=Path(), variants=("hot=--matrix_lr=0.03",))
    baseline, others = bench.entries(cfg, EAGER, compiled=True)
    assert baseline.variant.side == "upstream"
    assert baseline.variant.compiled
    assert [other.name for other in others] == ["ours", "hot"]


def test_too_few_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "standard_library", lambda limit: TEXT)
    sizes = Sizes(16, 300, 4, 4)
    folder = bench.rows_of("code", Config(steps=(5,)), sizes, tmp_path)
    assert (folder / "rows.npy").exists()
    with pytest.raises(UserError, match=r"1,000 rows"):
        bench.rows_of("code", Config(steps=(500,)), sizes, tmp_path)


def test_documents_are_pieces_of_both_languages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench, "PIECE", 1000)
    english = "".join(f"The cat number {i} sleeps on the mat. " for i in range(1000))
    chinese = "".join(f"第{i}只猫睡在垫子上。" for i in range(2000))
    (tmp_path / "english.txt").write_text(english, encoding="utf-8")
    (tmp_path / "chinese.txt").write_text(chinese[:2000], encoding="utf-8")
    with pytest.raises(UserError, match=r"chinese\.txt must hold 0\.02 MB"):
        bench.documents(tmp_path, [0.02, 0.02])
    (tmp_path / "chinese.txt").write_text(chinese, encoding="utf-8")
    pieces = bench.documents(tmp_path, [0.02, 0.02]).documents
    assert len(set(pieces)) == len(pieces)
    for word, first in (("cat", pieces[0]), ("猫", pieces[1])):
        assert word in first
        size = sum(len(piece.encode()) for piece in pieces if word in piece)
        assert 20_000 <= size < 23_500


@pytest.mark.slow
def test_a_flag_of_a_variant_changes_what_is_trained(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs", None)
    run = run_in(tmp_path / "rows")
    slow = replace(run, entry=Entry("slow", replace(EAGER, flags=("--matrix_lr=0.001",))))
    ours = runs(run)
    changed = runs(slow)
    assert ours.losses[0] == changed.losses[0]
    assert ours.bits_per_byte != changed.bits_per_byte
    assert len(ours.losses) == 6


@pytest.mark.slow
def test_a_run_that_reads_its_text_more_than_twice_has_no_pairs(tmp_path: Path) -> None:
    """base_train leaves them out too."""
    plan = run_in(tmp_path / "rows").plan
    long = replace(plan, horizon=math.ceil(2.1 / plan.epochs * 6))
    parameters = []
    for run_plan in (plan, long):
        with training(EAGER, run_plan) as process:
            parameters.append(process.answer()["parameters"])
    assert parameters[0] - parameters[1] == 32 * TINY.vocab_size * TINY.n_embd


# Its optimizer writes the rate of each step to a file.
RECORDED = (
    SOURCE.replace("torch.optim.SGD", "Recorded")
    + """
class Recorded(torch.optim.SGD):
    def step(self):
        super().step()
        with open(os.path.join(os.path.dirname(__file__), "rates"), "a") as rates:
            print(self.param_groups[0]["lr"], file=rates)
"""
)


@pytest.mark.slow
def test_upstreams_rates_follow_its_schedule(tmp_path: Path) -> None:
    upstream = fake_upstream(tmp_path / "upstream", RECORDED)
    Runs(tmp_path / "runs", upstream)(run_in(tmp_path / "rows", UPSTREAM, horizon=60))
    rates = (upstream / "nanochat" / "rates").read_text().split()[1:]  # the first step compiles
    expected = [upstream_factors(step, 60)[0] for step in range(60)]
    assert [float(rate) for rate in rates] == pytest.approx(expected)


@pytest.mark.slow
def test_compiling_is_no_part_of_upstreams_cost(tmp_path: Path) -> None:
    """The first pass of this upstream takes 0.3 CPU seconds, as a compiler does."""
    run = run_in(tmp_path / "rows", UPSTREAM, horizon=2)
    result = Runs(tmp_path / "runs", fake_upstream(tmp_path / "upstream"))(run)
    assert result.seconds < 0.25
    assert result.losses[0] == pytest.approx(math.log(300), abs=1e-4)


def test_quick_compares_and_a_second_call_trains_nothing(
    base_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "QUICK", Sizes(16, 300, 4, 4))
    monkeypatch.setattr(bench, "standard_library", lambda limit: TEXT)
    monkeypatch.setattr(bench, "Runs", FakeRuns)
    results = []
    for _ in range(2):
        bench.main(Config(quick=True))
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [result["trained"] for result in results] == [6, 0]
    assert results[0]["figures"] == results[1]["figures"]
