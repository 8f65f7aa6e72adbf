"""Compute multipliers: the arithmetic on power laws, runs that are kept, what is refused, and a small comparison."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.multiplier import __main__ as bench
from bench.multiplier import runs as running
from bench.multiplier.__main__ import Config, Sizes
from bench.multiplier.curves import Point, cost_to_reach, improving, interval, multiplier
from bench.multiplier.picture import Line, draw
from bench.multiplier.runs import Entry, Result, Run, Runs, tuned
from bench.train import worker as training
from bench.train.rows import ABOUT, Text, make_rows
from bench.train.side import batches
from bench.train.worker import ROOT, Plan, Variant, Worker, flops_per_token
from nanochat.common import UserError, read_json, write_json
from nanochat.gpt import GPTConfig
from nanochat.runtime.progress import Progress
from tests.bench.train.test_train import TEXT, TINY, fake_upstream

EAGER = Variant("ours", "float32")
UPSTREAM = Entry("upstream", replace(EAGER, side="upstream"))


def law(cost: float, faster: float = 1.0) -> Point:
    """A power law that reaches every loss for `faster` times less."""
    return Point(cost, 3.0 * (cost * faster) ** -0.2)


# --- arithmetic ------------------------------------------------------------------------------------


def test_the_multiplier_of_a_power_law_is_the_known_one() -> None:
    curve = [law(cost) for cost in (1e9, 2e9, 4e9)]
    found = multiplier([law(1.3e9, 1.7), law(2e9, 1.7)], [curve, curve[::-1]])
    assert found is not None and found.mean == pytest.approx(1.7) and not found.extrapolated
    assert found.error == pytest.approx(0, abs=1e-9) and found.low == pytest.approx(1.7) and found.helps()
    slower = multiplier([law(2e9, 0.8)], [curve])
    assert slower is not None and slower.mean == pytest.approx(0.8) and not slower.helps()


def test_a_loss_beyond_the_curve_continues_its_last_segment_and_is_marked() -> None:
    curve = [law(1e9), law(2e9)]
    for point, expected in ((law(2e9, 3.0), 3.0), (law(1e9, 0.5), 0.5)):
        found = multiplier([point], [curve])
        assert found is not None and found.mean == pytest.approx(expected)
        assert found.extrapolated and found.words == f"{expected:.3f}?"
    inside = cost_to_reach(curve, law(2e9).bits_per_byte)
    assert inside is not None and not inside.extrapolated and inside.amount == pytest.approx(2e9)


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
    assert (found.low, found.high) == pytest.approx((math.exp(0.1 - 4.303 * error), math.exp(0.1 + 4.303 * error)))
    assert not found.helps()  # 3 seeds so far apart leave 1 inside the interval
    alone = interval([1.5], True)
    assert (alone.error, alone.low, alone.words) == (None, None, "1.500?") and not alone.helps()
    assert interval([1.1] * 12, False).low == pytest.approx(1.1)


def test_flops_count_the_keys_that_windows_let_a_query_see() -> None:
    shape = GPTConfig(512, 4096, 4, 4, 4, 256, "L")
    assert flops_per_token(shape) == 31_457_280
    windowed = replace(shape, window_pattern="SSSL")  # 128 keys in three layers
    assert flops_per_token(shape) - flops_per_token(windowed) == 12 * 256 * 3 * (512 - 128)


def test_a_seed_decides_the_order_of_rows_and_nothing_else_does() -> None:
    """The order is drawn by numpy from the seed alone, so both sides read the same."""
    rows = np.arange(40).reshape(10, 4)
    drawn = [rows[np.random.default_rng(seed).permutation(10)] for seed in (1, 1, 2)]
    first = [next(batches(order, 4, 0))[0].tolist() for order in drawn]
    assert first[0] == first[1] != first[2]


# --- runs that are kept ----------------------------------------------------------------------------


class Counting(Runs):
    """Trains by a made-up law instead of in a process."""

    def __init__(self, folder: Path, peer: Path | None, best: float = 1.0):
        super().__init__(folder, peer, Progress("test", None, "GFLOPs", shown=False))
        self.asked: list[Run] = []
        self.best = best

    def _train(self, run: Run, kept: Path) -> Result:
        self.asked.append(run)
        upstream = run.entry.variant.side == "upstream"
        off = abs(math.log2(run.entry.variant.scale / self.best)) / 100 if upstream else 0.0
        worse = 1.2 if upstream else 1.0
        point = law(run.flops / worse)
        bits = point.bits_per_byte + off + (run.plan.seed or 0) / 1e7
        return Result(running.settings(run, self.peer), 1, [run.flops], [run.flops / 1e9], [bits], [1.0], "2", "cpu")


def plan_in(folder: Path) -> Plan:
    make_rows(folder, TINY.vocab_size, TINY.sequence_len, TEXT)
    return Plan(TINY, folder, rows_per_step=4, rounds=0, steps=0, warmup=0, horizon=6, held_out=4, seed=1)


def test_the_factor_on_upstreams_rates_is_searched_until_it_lies_inside(tmp_path: Path) -> None:
    peer = fake_upstream(tmp_path / "upstream")
    run = Run("code", 2, UPSTREAM, plan_in(tmp_path / "rows"))
    for best, tried in ((1.0, [1.0, 2.0, 0.5]), (4.0, [1.0, 2.0, 4.0, 8.0]), (0.25, [1.0, 2.0, 0.5, 0.25, 0.125])):
        folder = tmp_path / f"{best:g}"
        folder.mkdir()
        runs = Counting(folder, peer, best)
        assert tuned(runs, run, (1.0, 2.0)) == best
        assert [asked.entry.variant.scale for asked in runs.asked] == tried
    assert tuned(runs, replace(run, entry=Entry("ours", EAGER)), (1.0, 2.0)) == 1.0 and len(runs.asked) == 5


def test_the_comparison_finds_the_multiplier_of_its_runs(tmp_path: Path) -> None:
    """Upstream spends 1.2 times as much for every loss; the baseline is tuned with the first seed alone."""
    runs = Counting(tmp_path, fake_upstream(tmp_path / "upstream"), best=2.0)
    cfg = Config(steps=(6,), seeds=(1, 2, 3))
    figures, lines = bench.measure_one(
        "code", 2, plan_in(tmp_path / "rows"), UPSTREAM, [Entry("ours", EAGER)], cfg, runs
    )
    (found,) = figures
    assert found.flops is not None and found.flops.mean == pytest.approx(1.2, abs=0.002)
    assert found.seconds is not None and found.scale == 2.0 and found.difference < 0
    upstream = [run for run in runs.asked if run.entry.name == "upstream"]
    assert len(upstream) == 3 + 2 + 3 and {run.plan.seed for run in upstream[:3]} == {1}
    assert [len(line.ends) for line in lines] == [2, 1] and len(lines[0].curves) == 6
    cfg = replace(cfg, search=False, scales=(4.0, 2.0))
    before = len(runs.asked)
    (fixed,), _ = bench.measure_one("code", 2, plan_in(tmp_path / "rows"), UPSTREAM, [Entry("ours", EAGER)], cfg, runs)
    assert fixed.scale == 4.0 and {run.entry.variant.scale for run in runs.asked[before:]} == {4.0}
    words = bench.table(figures, "upstream")
    assert "code, d2, 6" in words and "x2" in words and "±" in words
    draw(lines, tmp_path / "picture.png")
    draw([Line("b", "x", [(1e9, 2.0, 0.0)], [])], tmp_path / "alone.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"upstream": Path("nowhere")}, "--upstream must name a folder with a checkout"),
        ({"quick": True, "variants": ("a=--matrix_lr=1",)}, "leave out --quick"),
        ({"steps": (0,)}, "--steps must be at least 1, got 0"),
        ({"seeds": (1, 1)}, "--seeds must be one or more different values, got 1 1"),
        ({"stretch": (1.0,)}, "two lengths of the baseline's runs"),
        ({"stretch": (1.0, 0.0)}, "--stretch must be above 0"),
        ({"scales": ()}, "got none"),
        ({"megabytes": (8.0, 0.0), "texts": ("code",)}, "--megabytes must be one or two numbers above 0, got 8 0"),
        ({"megabytes": (1.0, 2.0, 3.0)}, "--megabytes must be one or two numbers above 0, got 1 2 3"),
        ({}, "--texts documents needs --corpus DIR"),
        ({"texts": ("code",)}, "--baseline must be one of ours, none was given"),
        ({"texts": ("code",), "baseline": "theirs"}, "one of ours, got theirs; upstream needs --upstream"),
        ({"texts": ("code",), "baseline": "ours"}, "give --variants NAME=FLAGS"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_rule(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        bench.check(Config(**flags))
        bench.entries(Config(**flags), EAGER, compiled=True)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("Hot=--matrix_lr=0.03", "a name of small letters"),
        ("ours=--matrix_lr=0.03", "a name of small letters"),
        ("hot", "variant hot changes nothing"),
        ("hot=--depth=3", "may have the flags --checkout=DIR and --unembedding_lr=.*, got '--depth=3'"),
        ("hot=matrix_lr=3", "got 'matrix_lr=3'"),
        ("hot=--checkout=nowhere", "nowhere is no checkout of this repository: it has no nanochat/gpt.py"),
    ],
)
def test_an_unknown_variant_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        bench.entry(words, EAGER)


def test_variants_are_flags_of_base_train_or_another_checkout() -> None:
    made = bench.entry(f"hot=--matrix-lr=0.03  --warmup_steps=5 --checkout={ROOT}", EAGER).variant
    assert made.flags == ("--matrix_lr=0.03", "--warmup_steps=5") and made.checkout == ROOT
    assert "--matrix_lr=0.03" in made.name
    cfg = Config(texts=("code",), baseline="ours", variants=("hot=--matrix_lr=0.03", "cold=--matrix_lr=0.01"))
    baseline, others = bench.entries(cfg, EAGER, compiled=True)
    assert baseline.name == "ours" and [other.name for other in others] == ["hot", "cold"]
    with pytest.raises(UserError, match="two entries with the name hot"):
        bench.entries(replace(cfg, variants=("hot=--matrix_lr=0.03",) * 2), EAGER, compiled=True)
    beside, others = bench.entries(replace(cfg, baseline=None, upstream=Path()), EAGER, compiled=True)
    assert beside.variant.side == "upstream" and beside.variant.compiled and not others[0].variant.compiled
    assert [other.name for other in others] == ["ours", "hot", "cold"]


def test_a_text_too_short_for_the_runs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "standard_library", lambda limit: TEXT)
    sizes, cfg = Sizes(16, 300, 4, 4), Config(texts=("code",))
    bench.rows_of("code", cfg, sizes, tmp_path / "rows", 10)
    with pytest.raises(UserError, match=r"'code' must have at least 1,000 rows to train on.* 1,000 steps.*got \d+"):
        bench.rows_of("code", cfg, sizes, tmp_path / "rows", 1000)
    write_json(tmp_path / "made.json", {})
    with pytest.raises(UserError, match=r"made by: python -m bench\.corpus DIR"):
        bench.rows_of("documents", replace(cfg, corpus=tmp_path), sizes, tmp_path / "other", 10)


def test_rows_of_another_text_are_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes, cfg, folder = Sizes(16, 300, 4, 4), Config(texts=("code",)), tmp_path / "rows"

    def rows_of(text: Text) -> dict[str, Any]:
        monkeypatch.setattr(bench, "standard_library", lambda limit: text)
        bench.rows_of("code", cfg, sizes, folder, 10)
        return read_json(folder / ABOUT)

    first, told = rows_of(TEXT), len(capsys.readouterr().out.splitlines())
    assert rows_of(Text(TEXT.documents, "cats, again")) == first and told > 1  # the same text: the rows are kept
    for other in (Text(TEXT.documents[1:], "cats"), Text([*TEXT.documents[::-1]], "cats")):
        with pytest.raises(UserError, match=r"must be made of cats, .*give another --out, or delete") as refused:
            rows_of(other)
        assert refused.value.exit_code == 2 and read_json(folder / ABOUT) == first
    write_json(folder / ABOUT, {name: value for name, value in first.items() if name != "text_sha256"})
    assert rows_of(TEXT) == first  # made again, since an earlier version did not keep what they were made of
    with pytest.raises(UserError, match=r"--corpus must name a folder with english\.txt, got .*nowhere"):
        bench.rows_of("documents", replace(cfg, corpus=Path("nowhere")), sizes, folder, 10)


def test_documents_are_pieces_of_both_languages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PIECE", 1000)
    english = "".join(f"The cat number {i} sleeps on the mat. " for i in range(1000))
    (tmp_path / "english.txt").write_text(english, encoding="utf-8")
    (tmp_path / "chinese.txt").write_text("".join(f"第{i}只猫睡在垫子上。" for i in range(200)), encoding="utf-8")
    with pytest.raises(UserError, match=r"chinese\.txt must hold 0\.02 MB.*got 0\.0 MB"):
        bench.documents(tmp_path, [0.02])
    (tmp_path / "chinese.txt").write_text("".join(f"第{i}只猫睡在垫子上。" for i in range(2000)), encoding="utf-8")
    pieces = bench.documents(tmp_path, [0.02, 0.02]).documents
    assert len(set(pieces)) == len(pieces) and all(100 <= len(piece) <= 1000 for piece in pieces)
    assert "cat" in pieces[0] and "猫" in pieces[1]
    for word in ("cat", "猫"):
        size = sum(len(piece.encode()) for piece in pieces if word in piece)
        assert 20_000 <= size < 23_500


# --- real processes --------------------------------------------------------------------------------


def test_a_checkout_s_own_code_is_what_runs(tmp_path: Path) -> None:
    """A copy with a tenth of Muon's rate ends where a flag for the same rate ends, which is not where ours ends."""
    copy = tmp_path / "copy"
    for folder in ("nanochat", "scripts", "bench/train"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "bench" / "__init__.py").touch()
    shutil.copytree(ROOT / "tasks", copy / "tasks", ignore=shutil.ignore_patterns("__pycache__"))
    schedule = copy / "nanochat" / "train" / "schedule.py"
    schedule.write_text(schedule.read_text().replace("return min(2.0, max(1.0, 400 / steps))", "return 0.1"))
    plan = plan_in(tmp_path / "rows")
    variants = {"ours": EAGER, "changed": replace(EAGER, checkout=copy),
                "flagged": replace(EAGER, flags=("--matrix_lr=0.001",))}  # fmt: skip
    runs = Runs(tmp_path / "runs", None, Progress("test", None, "GFLOPs", shown=False))
    runs.folder.mkdir()
    ends = [runs(Run("code", 2, Entry(name, variant), plan)) for name, variant in variants.items()]
    ours, changed, flagged = ends
    assert changed.end == pytest.approx(flagged.end, abs=1e-6) and abs(changed.end - ours.end) > 1e-4
    assert ours.losses[0] == changed.losses[0] and len(ours.losses) == 6 and len(ours.bits_per_byte) == 4
    assert runs(Run("code", 2, Entry("ours", EAGER), plan)) == ours and runs.trained == 3


def test_a_run_that_reads_its_text_more_than_twice_has_no_pairs_as_in_base_train(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "rows")
    long = replace(plan, horizon=math.ceil(2.1 / plan.epochs * 6))
    assert 0 < plan.epochs <= 2 < long.epochs
    parameters = []
    for one in (plan, long):
        with training.workers([EAGER], one, None) as (worker,):
            parameters.append(worker.answer()["parameters"])
    assert parameters[0] - parameters[1] == 32 * TINY.vocab_size * TINY.n_embd


@pytest.mark.parametrize("entry", [Entry("ours", EAGER), UPSTREAM], ids=["ours", "upstream"])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    entry: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "TURN", 1)
    monkeypatch.setattr(running, "KEEP", 2)
    peer, plan = fake_upstream(tmp_path / "upstream"), plan_in(tmp_path / "rows")
    run = Run("code", 2, entry, replace(plan, horizon=8))

    def train(name: str, most: int) -> Result:
        """The run, of which this process takes at most `most` steps."""
        steps = iter(range(most))

        class Stopped(Worker):
            def ask(self, steps_: int) -> dict[str, Any]:
                if next(steps, None) is None:
                    raise KeyboardInterrupt
                return super().ask(steps_)

        monkeypatch.setattr(training, "Worker", Stopped)
        (tmp_path / name).mkdir(exist_ok=True)
        return Runs(tmp_path / name, peer, Progress("test", None, "GFLOPs", shown=False))(run)

    whole = train("whole", 8)
    with pytest.raises(KeyboardInterrupt):
        train("parts", 5)
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".part"]
    again = train("parts", 4)  # the steps after the fourth, the last that was saved
    assert again.losses == whole.losses and again.bits_per_byte == whole.bits_per_byte and len(whole.losses) == 8
    assert len(again.seconds) == 4 and again.seconds == sorted(again.seconds)
    assert [path.suffix for path in (tmp_path / "parts").iterdir()] == [".json"]


@pytest.mark.slow
def test_quick_compares_and_a_second_call_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    monkeypatch.setattr(bench, "QUICK", Sizes(16, 300, 4, 4))
    monkeypatch.setattr(bench, "standard_library", lambda limit: Text(TEXT.documents, "cats"))
    found = []
    for _ in range(2):
        bench.main(Config(quick=True, out=tmp_path / "out"))
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert [result["trained"] for result in found] == [6, 0]
    assert found[0]["figures"] == found[1]["figures"] and found[0]["baseline"] == "adamw"
    figure = found[0]["figures"][0]
    assert abs(figure["difference"]) < 0.2 * figure["baseline"]
    assert figure["flops"] is None or figure["flops"]["mean"] > 0  # None: so few steps of the other never get there
    assert (tmp_path / "out" / "adamw-ours.png").exists() and (tmp_path / "out" / "adamw-ours.json").exists()
