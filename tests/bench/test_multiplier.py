"""Compute multipliers: the arithmetic on power laws, runs that are saved, what is refused, a small comparison."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.multiplier import __main__ as bench
from bench.multiplier import runs as running
from bench.multiplier.__main__ import Config, Sizes
from bench.multiplier.curves import Point, cost_to_reach, improving, interval, multiplier
from bench.multiplier.runs import Entry, Result, Run, Runs, best_scale
from bench.processes import ROOT, Side
from bench.text import Text
from bench.train.variants import Plan, Variant, training
from nanochat.common import UserError
from tests.bench.fakes import TEXT, TINY, fake_upstream, tiny_plan

EAGER = Variant("ours", "float32")
OURS = Entry("ours", EAGER)
UPSTREAM = Entry("upstream", replace(EAGER, side="upstream"))


def law(cost: float, faster: float = 1.0) -> Point:
    """A power law that reaches every loss for `faster` times less."""
    return Point(cost, 3.0 * (cost * faster) ** -0.2)


# --- arithmetic ------------------------------------------------------------------------------------


def test_the_multiplier_of_a_power_law_is_the_known_one() -> None:
    curve = [law(cost) for cost in (1e9, 2e9, 4e9)]
    found = multiplier([law(1.3e9, 1.7), law(2e9, 1.7)], [curve, curve[::-1]])
    assert found is not None and found.mean == pytest.approx(1.7) and not found.extrapolated
    slower = multiplier([law(2e9, 0.8)], [curve])
    assert slower is not None and slower.mean == pytest.approx(0.8)


def test_a_loss_beyond_the_curve_continues_its_last_segment_and_is_marked() -> None:
    curve = [law(1e9), law(2e9)]
    for point, expected in ((law(2e9, 3.0), 3.0), (law(1e9, 0.5), 0.5)):
        found = multiplier([point], [curve])
        assert found is not None and found.mean == pytest.approx(expected)
        assert found.extrapolated and found.words == f"{expected:.3f}?"


def test_a_longer_run_that_is_no_better_is_left_out() -> None:
    points = [Point(4.0, 1.6), Point(1.0, 2.0), Point(2.0, 2.1), Point(3.0, 2.0)]
    assert improving(points) == [Point(1.0, 2.0), Point(4.0, 1.6)]
    assert cost_to_reach([Point(1.0, 2.0), Point(2.0, 2.0)], 1.9) is None
    assert multiplier([Point(1.0, 1.9)], [[Point(1.0, 2.0), Point(2.0, 2.1)]]) is None


def test_the_interval_is_student_s_over_the_logarithms() -> None:
    found = interval([1.0, math.exp(0.1), math.exp(0.2)], False)
    error = 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.1))
    assert found.error == pytest.approx(math.exp(0.1) * error)
    ends = (math.exp(0.1 - 4.303 * error), math.exp(0.1 + 4.303 * error))
    assert (found.low, found.high) == pytest.approx(ends)
    alone = interval([1.5], True)
    assert (alone.error, alone.low, alone.words) == (None, None, "1.500?")


# --- runs ------------------------------------------------------------------------------------------


class FakeRuns(Runs):
    """Trains by a made-up law instead of in a process; upstream spends 1.2 times as much."""

    def __init__(self, folder: Path, upstream: Path | None = None, best: float = 1.0):
        super().__init__(folder, upstream)
        self.requests: list[Run] = []
        self.best = best

    def train(self, run: Run, saved_state: Path) -> Result:
        self.requests.append(run)
        flops = run.flops_per_step * run.steps
        bits = law(flops).bits_per_byte
        if run.entry.variant.side == "upstream":
            distance = abs(math.log2(run.entry.variant.scale / self.best))
            bits = law(flops / 1.2).bits_per_byte + distance / 100
        result = Result({"seed": run.plan.seed}, flops / 1e9)
        result.flops, result.seconds, result.bits_per_byte = [flops], [flops / 1e9], [bits]
        return result


def run_in(folder: Path, entry: Entry = OURS, **settings: Any) -> Run:
    plan = tiny_plan(folder, warmup=0, horizon=6, seed=1)
    return Run("code", 2, entry, replace(plan, **settings))


def test_a_finished_run_is_never_trained_again_and_a_changed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path / "rows")
    first = FakeRuns(tmp_path / "runs")(run)
    again = FakeRuns(tmp_path / "runs")
    assert again(run) == first and again.requests == []
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


def test_code_is_among_the_settings_of_the_side_that_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = fake_upstream(tmp_path / "upstream")
    own, theirs = run_in(tmp_path / "rows"), run_in(tmp_path / "rows", UPSTREAM)
    checkout = fake_upstream(tmp_path / "own")
    for name in running.OUR_CODE[1:]:
        (checkout / name).parent.mkdir(parents=True)
        (checkout / name).touch()
    changed = replace(own, entry=Entry("ours", replace(EAGER, checkout=checkout)))

    def settings() -> list[dict[str, Any]]:
        return [running.settings_of(run, upstream) for run in (theirs, changed)]

    before = settings()
    (checkout / "nanochat" / "gpt.py").write_text("X = 1\n")
    after = settings()
    assert after[0] == before[0] and after[1] != before[1]
    (upstream / "nanochat" / "common.py").write_text("X = 1\n")
    assert settings()[0] != before[0]


def test_the_factor_on_upstreams_rates_is_searched_until_it_lies_inside(tmp_path: Path) -> None:
    upstream = fake_upstream(tmp_path / "upstream")
    run = run_in(tmp_path / "rows", UPSTREAM)
    for best, tried in ((1.0, [1.0, 2.0, 0.5]), (4.0, [1.0, 2.0, 4.0, 8.0])):
        runs = FakeRuns(tmp_path / f"{best:g}", upstream, best)
        assert best_scale(runs, run, (1.0, 2.0)) == best
        assert [request.entry.variant.scale for request in runs.requests] == tried
    assert best_scale(runs, replace(run, entry=OURS), (2.0,)) == 1.0


def test_the_comparison_finds_the_multiplier_of_its_runs(tmp_path: Path) -> None:
    runs = FakeRuns(tmp_path / "runs", fake_upstream(tmp_path / "upstream"), best=2.0)
    template = run_in(tmp_path / "rows")
    (found,) = bench.measure(template, UPSTREAM, [OURS], Config(steps=(6,)), runs)
    assert found.flops is not None and found.flops.mean == pytest.approx(1.2, abs=0.002)
    assert found.seconds is not None and found.scale == 2.0 and found.difference < 0
    seeds = [run.plan.seed for run in runs.requests if run.entry == OURS]
    assert seeds == [1, 2, 3]
    assert "code, d2, 6" in bench.table([found], "upstream")


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"upstream": Path("nowhere")}, "--upstream"),
        ({"quick": True, "variants": ("a=--matrix_lr=1",)}, "--quick"),
        ({"steps": (0,)}, "--steps.*got 0"),
        ({"seeds": (1, 1)}, "--seeds.*got 1 1"),
        ({"stretch": (1.0,)}, "--stretch"),
        ({"scales": ()}, "--scales.*none"),
        ({"megabytes": (1.0, 2.0, 3.0)}, "--megabytes"),
        ({}, "--corpus DIR"),
        ({"texts": ("code",)}, "--baseline.*none"),
        ({"texts": ("code",), "baseline": "theirs"}, "--baseline.*theirs"),
        ({"texts": ("code",), "baseline": "ours"}, "--variants"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as refused:
        bench.check(Config(**flags))
        bench.entries(Config(**flags), EAGER, compiled=True)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        "Hot=--matrix_lr=0.03",
        "ours=--matrix_lr=0.03",
        "hot",
        "hot=--depth=3",
        "hot=matrix_lr=3",
        "hot=--checkout=nowhere",
    ],
)
def test_an_unknown_variant_is_refused(words: str) -> None:
    with pytest.raises(UserError) as refused:
        bench.entry(words, EAGER)
    assert refused.value.exit_code == 2


def test_variants_are_flags_of_base_train_or_another_checkout() -> None:
    hot = bench.entry(f"hot=--matrix-lr=0.03  --warmup_steps=5 --checkout={ROOT}", EAGER).variant
    assert hot.flags == ("--matrix_lr=0.03", "--warmup_steps=5") and hot.checkout == ROOT
    cfg = Config(upstream=Path(), variants=("hot=--matrix_lr=0.03",))
    baseline, others = bench.entries(cfg, EAGER, compiled=True)
    assert baseline.variant.side == "upstream" and baseline.variant.compiled
    assert [other.name for other in others] == ["ours", "hot"]


def test_rows_of_another_text_or_too_few_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "standard_library", lambda limit: TEXT)
    sizes, cfg = Sizes(16, 300, 4, 4), Config(texts=("code",))
    assert bench.rows_of("code", cfg, sizes, tmp_path, 10) == tmp_path / "rows" / "code-300-16"
    with pytest.raises(UserError, match=r"1,000 rows"):
        bench.rows_of("code", cfg, sizes, tmp_path, 1000)
    other = Text(TEXT.documents[::-1], "cats")
    monkeypatch.setattr(bench, "standard_library", lambda limit: other)
    with pytest.raises(UserError, match=other.sha256[:16]) as refused:
        bench.rows_of("code", cfg, sizes, tmp_path, 10)
    assert refused.value.exit_code == 2


def test_documents_are_pieces_of_both_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PIECE", 1000)
    english = "".join(f"The cat number {i} sleeps on the mat. " for i in range(1000))
    chinese = "".join(f"第{i}只猫睡在垫子上。" for i in range(2000))
    (tmp_path / "english.txt").write_text(english, encoding="utf-8")
    (tmp_path / "chinese.txt").write_text(chinese[:2000], encoding="utf-8")
    with pytest.raises(UserError, match=r"chinese\.txt must hold 0\.02 MB"):
        bench.documents(tmp_path, [0.02, 0.02])
    (tmp_path / "chinese.txt").write_text(chinese, encoding="utf-8")
    pieces = bench.documents(tmp_path, [0.02, 0.02]).documents
    assert len(set(pieces)) == len(pieces) and "cat" in pieces[0] and "猫" in pieces[1]
    for word in ("cat", "猫"):
        assert 20_000 <= sum(len(piece.encode()) for piece in pieces if word in piece) < 23_500


# --- real processes --------------------------------------------------------------------------------


def test_a_flag_of_a_variant_changes_what_is_trained(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs", None)
    run = run_in(tmp_path / "rows")
    slow = replace(run, entry=Entry("slow", replace(EAGER, flags=("--matrix_lr=0.001",))))
    ours, changed = runs(run), runs(slow)
    assert ours.losses[0] == changed.losses[0] and ours.end != changed.end
    assert len(ours.losses) == 6 and len(ours.bits_per_byte) == 4


def test_a_run_that_reads_its_text_more_than_twice_has_no_pairs_as_in_base_train(
    tmp_path: Path,
) -> None:
    plan = run_in(tmp_path / "rows").plan
    long = replace(plan, horizon=math.ceil(2.1 / plan.epochs * 6))
    parameters = []
    for each_plan in (plan, long):
        with training(EAGER, each_plan) as process:
            parameters.append(process.answer()["parameters"])
    assert parameters[0] - parameters[1] == 32 * TINY.vocab_size * TINY.n_embd


@pytest.mark.parametrize("entry", [OURS, UPSTREAM], ids=["ours", "upstream"])
def test_a_run_that_was_stopped_resumes_where_it_was_saved(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "SAVE_EVERY", 2)
    upstream = fake_upstream(tmp_path / "upstream")
    run = run_in(tmp_path / "rows", entry, horizon=8)
    complete = Runs(tmp_path / "complete", upstream)(run)
    real_ask, requests = Side.ask, iter(range(6))

    def stopped(side: Side, request: Any) -> Any:
        if next(requests, None) is None:
            raise KeyboardInterrupt
        return real_ask(side, request)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Side, "ask", stopped)
        Runs(tmp_path / "parts", upstream)(run)
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".part"]
    resumed = Runs(tmp_path / "parts", upstream)(run)
    assert resumed.losses == complete.losses and len(resumed.losses) == 8
    assert resumed.bits_per_byte == complete.bits_per_byte and len(resumed.seconds) == 4
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".json"]


def test_compiling_is_no_part_of_upstreams_cost(tmp_path: Path) -> None:
    """The first pass of this upstream takes 0.3 CPU seconds, as a compiler does, and changes nothing."""
    run = run_in(tmp_path / "rows", UPSTREAM, horizon=2)
    result = Runs(tmp_path / "runs", fake_upstream(tmp_path / "upstream"))(run)
    assert result.spent < 0.25 and result.losses[0] == pytest.approx(math.log(300), abs=1e-4)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Config]:
    monkeypatch.setattr(bench, "QUICK", Sizes(16, 300, 4, 4))
    monkeypatch.setattr(bench, "standard_library", lambda limit: TEXT)
    yield Config(quick=True, out=tmp_path / "out")


@pytest.mark.slow
def test_quick_compares_and_a_second_call_trains_nothing(quick: Config, capsys: pytest.CaptureFixture[str]) -> None:
    results = []
    for _ in range(2):
        bench.main(quick)
        results.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [result["trained"] for result in results] == [6, 0]
    assert results[0]["figures"] == results[1]["figures"]
    assert quick.out is not None and (quick.out / "adamw-ours.json").exists()


def test_a_plan_counts_its_epochs(tmp_path: Path) -> None:
    plan: Plan = run_in(tmp_path / "rows").plan
    assert 0 < plan.epochs < 2 < replace(plan, horizon=600).epochs
