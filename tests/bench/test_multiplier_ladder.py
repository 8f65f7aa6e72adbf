"""The ladder: its runs are trained once, in parts and on several hosts, and compared fairly."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.multiplier import ladder
from bench.multiplier.ladder import Record, Rung
from bench.multiplier.runs import Entry, Result, Run
from bench.train.variants import Variant
from tests.bench.fakes import fake_upstream, tiny_plan

EAGER = Variant("ours", "float32")
OURS, UPSTREAM = Entry("ours", EAGER), Entry("upstream", replace(EAGER, side="upstream"))
RUNG = Rung("code", 2, 6, (1, 2), (1.0, 2.0))
RECIPES = {"ours": "now", "upstream": "theirs"}


def bits(flops: float, name: str) -> float:
    """A power law by which upstream spends 1.5 times as much."""
    return 3.0 * (flops * (1.5 if name == "ours" else 1.0)) ** -0.2


class Trainer:
    """Trains by the law; `cpu` is where."""

    def __init__(self, cpu: str):
        self.cpu = cpu
        self.requests: list[Run] = []

    def __call__(self, run: Run) -> Result:
        self.requests.append(run)
        return Result({}, run.flops, run.flops / 1e9, bits(run.flops, run.entry.name), [], self.cpu)


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """The runs of a ladder with one rung, and no other rung."""
    monkeypatch.setattr(ladder, "RUNGS", (RUNG,))
    monkeypatch.setattr(ladder, "our_recipe", lambda: RECIPES["ours"])
    rows = tmp_path / "rows"
    return [
        Run("code", RUNG.depth, entry, replace(tiny_plan(rows, warmup=0), **numbers))
        for entry, numbers in ladder.runs_of(RUNG, OURS, UPSTREAM)
    ]


def test_each_run_is_trained_once_and_none_begins_late(
    planned: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ladder.json"
    late, first, second = Trainer("A"), Trainer("A"), Trainer("B")
    assert ladder.climb(planned, RECIPES, late, 0.0, file) == 0
    assert ladder.climb(planned[:4], RECIPES, first, 1.0, file) == 4
    assert ladder.climb(planned, RECIPES, second, 1.0, file) == 2
    assert (late.requests, first.requests + second.requests) == ([], planned)
    (result,) = ladder.figures(ladder.read_records(file))
    assert result.flops is not None and result.seconds is not None
    assert (result.flops.mean, result.seconds.mean) == pytest.approx((1.5, 1.5), abs=0.01)
    assert (result.seeds, result.seeds_on_cpu, result.cpu) == (2, 1, "A")
    ladder.show([result])
    assert "code, d2, 6" in capsys.readouterr().out


def record(name: str, steps: int, **others: object) -> Record:
    flops = 1e9 * steps
    made = Record("code", "rows", 2, steps, name, 1, RECIPES[name], bits(flops, name), flops, steps, "A",
                  "float32", "2", "2026-11-28")  # fmt: skip
    return replace(made, **others)  # type: ignore[arg-type]


def test_runs_of_an_older_recipe_do_not_count(planned: list[Run]) -> None:
    assert planned
    seed = [record("ours", 6), record("upstream", 6), record("upstream", 12)]
    older = replace(seed[0], recipe="before", bits_per_byte=9.0, date="2026-12-01")
    (result,) = ladder.figures([older, *seed])
    assert result.bits_per_byte == seed[0].bits_per_byte
    assert ladder.figures([older, replace(seed[1], seed=2), seed[2]]) == []


def test_runs_on_other_rows_or_in_another_format_are_not_paired(planned: list[Run]) -> None:
    assert planned
    seed = [record("ours", 6), record("upstream", 6), record("upstream", 12)]
    for change in ({"rows": "others"}, {"dtype": "bfloat16"}):
        others = [replace(run, bits_per_byte=9.0, **change) for run in seed[1:]]  # type: ignore[arg-type]
        assert ladder.figures([*seed, *others]) == ladder.figures(seed) != []
        assert ladder.figures([seed[0], *others]) == []


def test_a_multiplier_beyond_upstream_s_longest_run_is_marked(planned: list[Run]) -> None:
    assert planned
    seed = [record("ours", 6, bits_per_byte=0.001), record("upstream", 6), record("upstream", 12)]
    (result,) = ladder.figures(seed)
    assert result.flops is not None and result.flops.extrapolated
    assert "?" in ladder.in_words(result.flops)


def test_the_recipe_follows_the_golden_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    goldens = ladder.golden.load()
    before = ladder.our_recipe()
    rounding = [loss + 1e-6 for loss in goldens.runs["d3"].losses]
    runs = {**goldens.runs, "d3": replace(goldens.runs["d3"], losses=tuple(rounding))}
    monkeypatch.setattr(ladder.golden, "load", lambda: replace(goldens, runs=runs))
    assert ladder.our_recipe() == before
    settings = {**goldens.runs["d3"].settings, "matrix_lr": 9.0}
    runs["d3"] = replace(goldens.runs["d3"], settings=settings)
    assert ladder.our_recipe() != before


def test_the_recipe_of_upstream_follows_its_code_and_its_rates(tmp_path: Path) -> None:
    checkout = fake_upstream(tmp_path / "upstream")
    before = ladder.upstream_recipe(checkout, UPSTREAM.variant)
    assert ladder.upstream_recipe(checkout, replace(UPSTREAM.variant, scale=2.0)) != before
    (checkout / "nanochat" / "common.py").write_text("X = 1\n")
    assert ladder.upstream_recipe(checkout, UPSTREAM.variant) != before
