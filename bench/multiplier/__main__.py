"""Measures how much more a baseline must spend to reach our loss: compute multipliers over seeds.

python -m bench.multiplier --quick                       # ours beside AdamW; 50 seconds
python -m bench.multiplier --upstream DIR --corpus DIR   # a checkout of karpathy/nanochat, and
                                                         # texts of bench.multiplier.corpus
python -m bench.multiplier --ladder --upstream DIR --hours 2   # see ladder.py
python -m bench.multiplier --baseline ours --variants "hot=--matrix_lr=0.03"
python -m bench.multiplier --baseline ours --variants "ema=--checkout=../with-ema"

What is compared: the multiplier is what the baseline spends to reach the final loss of our run,
divided by what our run spent (the definition of karpathy/nanochat's branch experiment_refactor).
Above 1, ours is better. The baseline is trained from the start to each of several lengths, --steps
times --stretch, and its curve goes through the ends of these runs, piecewise linear in the
logarithms of cost and loss. A loss beyond the curve continues its last segment, and the figure has
a question mark. Cost is counted in FLOPs, which are the same for both sides, and in CPU seconds.

How: both sides read the same rows of the same tokenizer in the same order, 4,096 tokens a step, and
are measured in bits per byte of rows that nothing trained on. Ours follows base_train's rules.
Upstream's rule for the batch would make its rates far too low at so few tokens, so they have a
factor instead: the one that was its best in dev/LOG.md, x2 up to 400 steps and x1 in longer runs.
Seeds are paired. Each seed gives one multiplier; the table shows their geometric mean and its
standard error.

The result of a run is a file in the base folder named by all of its settings, its code among them.
Typed again, the command trains only the runs that are missing.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from bench import tables
from bench.multiplier import corpus, ladder
from bench.multiplier.curves import Interval, multiplier_of
from bench.multiplier.runs import OUR_CODE, Entry, Result, Run, Runs
from bench.processes import check_peers, refuse
from bench.text import Text, make_rows, standard_library
from bench.train.variants import Plan, Variant
from nanochat import device
from nanochat.common import base_dir, log
from nanochat.data.command_line import given, run
from nanochat.gpt import GPTConfig
from nanochat.platforms import host
from nanochat.platforms.base import dtype_name

HEAD_DIM = 64  # a model has 64 channels per layer, as upstream's dial gives
SHORT = 400  # steps of a run in which upstream learns best at twice its rates
EPOCHS = 4  # more passes over the rows than this would measure how a model learns them by heart
PIECE = 10_000  # characters
# What base_train's flags can change in such a run; the other flags set other sizes, data and files.
FLAGS = """
    unembedding_lr embedding_lr matrix_lr matrix_optimizer scalar_lr weight_decay warmup_steps
    warmdown_ratio final_lr_frac bigram_rows offset_layers exclusive_layers
""".split()


@dataclass(frozen=True)
class Sizes:
    """What all runs of one call have in common."""

    length: int = 512  # tokens of a row
    vocab_size: int = 4096
    rows_per_step: int = 8
    held_out: int = 128  # rows

    def shape(self, depth: int) -> GPTConfig:
        """Return a model of this depth that sees whole rows: d4 is the model of bench.train."""
        return GPTConfig(
            self.length, self.vocab_size, depth, depth, depth, HEAD_DIM * depth, window_pattern="L"
        )


QUICK = Sizes(length=128, vocab_size=1024, held_out=32)


@dataclass(frozen=True)
class Config:
    """Print compute multipliers as a table, and as one JSON object on the last line."""

    quick: bool = False
    """compare ours with AdamW on the matrices, on two layers for a few steps: shows that the method
    works"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat, which is then the baseline"""
    baseline: Literal["upstream", "ours"] = "upstream"
    """what the others are compared with"""
    variants: tuple[str, ...] = ()
    """changes of ours to measure beside it, each as NAME=FLAGS: flags of base_train for rates,
    schedule and bigrams, separated by spaces, and --checkout=DIR for the code of another checkout
    of this repository"""
    corpus: Path | None = None
    """folder made by `python -m bench.multiplier.corpus DIR`, whose documents in English and
    Chinese are the second text; the first is Python's standard library"""
    depths: tuple[int, ...] = (4,)
    """layers of the models, with 64 channels per layer"""
    steps: tuple[int, ...] = (200,)
    """lengths of the runs that are compared, in steps of 4,096 tokens"""
    stretch: tuple[float, ...] = (1.0, 2.0)
    """lengths of the baseline's runs, as multiples of --steps: its curve must reach our loss, or is
    continued"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of weights and row order; the interval needs at least three"""
    scale: float | None = None
    """factor on upstream's learning rates; default: 2 in runs of up to 400 steps, otherwise 1"""
    megabytes: tuple[float, ...] = (5.0,)
    """MB of English and of Chinese in the text documents, or one number for both; longer runs need
    more"""
    ladder: bool = False
    """print the table of the ladder, whose sizes, lengths and seeds are fixed; with --upstream, train
    runs that are missing first"""
    hours: float = 2.0
    """time after which the ladder begins no other run"""

    @property
    def lengths(self) -> list[int]:
        """The lengths of the baseline's runs, in steps."""
        stretched = {round(steps * stretch) for steps in self.steps for stretch in self.stretch}
        return sorted(stretched | set(self.steps))


def check(cfg: Config) -> None:
    """Raise UserError for flags that cannot be measured."""
    check_peers(cfg.quick, cfg.variants, cfg.upstream)
    for flag in ("depths", "steps", "seeds", "stretch", "megabytes"):
        values = getattr(cfg, flag)
        if not values or min(values) <= 0 or len(set(values)) < len(values):
            words = " ".join(map(str, values)) or "none"
            raise refuse(f"--{flag} must be different values above 0, got {words}")
    if len(cfg.lengths) < 2:
        raise refuse(
            "a curve needs two lengths of the baseline's runs; give two numbers to --stretch or to "
            "--steps"
        )


def check_ladder(cfg: Config) -> None:
    """Raise UserError for flags that the ladder would ignore: its runs are fixed by its rungs."""
    fixed = ("quick", "baseline", "variants", "depths", "steps", "stretch", "seeds", "scale")
    ignored = given(cfg, fixed)
    if ignored:
        raise refuse(
            "--ladder has fixed sizes, lengths and seeds, so it takes only --upstream, --corpus, "
            f"--megabytes and --hours beside it, got --{', --'.join(ignored)}; leave these out, or "
            "leave out --ladder to measure what they say"
        )


def entry(words: str, ours: Variant) -> Entry:
    """Return a variant of ours from NAME=FLAGS; UserError for what cannot be used."""
    name, _, flag_words = words.partition("=")
    is_name = re.fullmatch(r"[a-z0-9_]+", name) and name not in ("ours", "upstream")
    if not is_name or not flag_words:
        raise refuse(
            "--variants takes NAME=FLAGS with a name of small letters, digits and _, and at least "
            f"one flag, such as hot=--matrix_lr=0.03, got {words!r}"
        )
    flags: list[str] = []
    checkout = None
    for flag in flag_words.split():
        key, _, value = flag.removeprefix("--").partition("=")
        key = key.replace("-", "_")
        is_flag = flag.startswith("--") and bool(value)
        if is_flag and key == "checkout" and _is_ours(Path(value)):
            checkout = Path(value)
        elif is_flag and key in FLAGS:
            flags.append(f"--{key}={value}")
        else:
            raise refuse(
                f"variant {name} may have the flags --{'=, --'.join(FLAGS)}=, and --checkout= with "
                f"a checkout of this repository, got {flag!r}"
            )
    return Entry(name, replace(ours, flags=tuple(flags), checkout=checkout))


def _is_ours(folder: Path) -> bool:
    """Return whether a folder is a checkout of this repository."""
    return all((folder / source).exists() for source in OUR_CODE)


def entries(cfg: Config, ours: Variant, compiled: bool) -> tuple[Entry, list[Entry]]:
    """Return the baseline, and what is compared with it. `compiled`: whether upstream is."""
    own = Entry("ours", ours)
    if cfg.quick:
        return Entry("adamw", replace(ours, flags=("--matrix_optimizer=adamw",))), [own]
    changes = [entry(words, ours) for words in cfg.variants]
    if len({change.name for change in changes}) < len(changes):
        raise refuse("--variants must have different names")
    if cfg.baseline == "ours":
        if not changes:
            raise refuse("nothing is compared with --baseline ours; give --variants NAME=FLAGS")
        return own, changes
    if cfg.upstream is None:
        raise refuse("there is no baseline; give --upstream DIR, or --baseline ours")
    upstream = replace(ours, side="upstream", compiled=compiled)
    return Entry("upstream", upstream), [own, *changes]


def documents(folder: Path, megabytes: Sequence[float]) -> Text:
    """Return pieces of English and Chinese documents in turn, that many MB of each language.

    Raises UserError if the corpus has too few.
    """
    english = pieces_of(folder, "english", megabytes[0])
    chinese = pieces_of(folder, "chinese", megabytes[-1])
    pairs = itertools.zip_longest(english, chinese)
    mixed = [piece for pair in pairs for piece in pair if piece is not None]
    about = f"Debian's documents, {megabytes[0]:g} MB of English, {megabytes[-1]:g} MB of Chinese"
    return Text(mixed, about)


def all_pieces(folder: Path, kind: str) -> Iterator[str]:
    """Yield all pieces of documents that are prose in the language."""
    for document in corpus.documents(folder, kind):
        for start in range(0, len(document), PIECE):
            piece = document[start : start + PIECE]
            if len(piece) >= PIECE // 10 and corpus.speaks(kind, piece):
                yield piece


def pieces_of(folder: Path, kind: str, megabytes: float) -> list[str]:
    """Return that many MB of different pieces, in random order; UserError if there are too few."""
    pieces = list(dict.fromkeys(all_pieces(folder, kind)))
    random.Random(0).shuffle(pieces)
    size = 0
    for count, piece in enumerate(pieces):
        if size >= 1e6 * megabytes:
            return pieces[:count]
        size += len(piece.encode())
    raise refuse(
        f"{folder / kind}.txt must hold {megabytes:g} MB of text in the language, got "
        f"{size / 1e6:.1f} MB; make a larger corpus with python -m bench.multiplier.corpus"
    )


def rows_of(name: str, cfg: Config, sizes: Sizes, out: Path) -> Path:
    """Return the folder with the rows of a text, made if they are missing.

    Raises UserError (code 2) if the rows are too few for the longest run.
    """
    if name == "code":
        text = standard_library(500_000 if cfg.quick else None)
    else:
        assert cfg.corpus is not None
        text = documents(cfg.corpus, cfg.megabytes)
    label = f"{name}-{sizes.vocab_size}-{sizes.length}-{text.sha256[:12]}"
    folder = out / "rows" / label
    about = make_rows(folder, sizes.vocab_size, sizes.length, text)
    longest = max(cfg.lengths)
    train_rows = about["rows"] - sizes.held_out
    read_rows = longest * sizes.rows_per_step
    needed_rows = math.ceil(read_rows / EPOCHS)
    if needed_rows > train_rows:
        raise refuse(
            f"the text {name!r} must have at least {needed_rows:,} rows to train on, so that a run "
            f"of {longest:,} steps reads none more than {EPOCHS} times, got "
            f"{max(train_rows, 0):,}; give a larger text, or fewer --steps or a smaller --stretch"
        )
    passes = read_rows / train_rows
    log(f"{name}: {about['rows']:,} rows, {passes:.2f} passes in the longest run; {text.about}")
    return folder


@dataclass(frozen=True)
class Figure:
    """One line of the table: an entry at one length beside the baseline of the same length."""

    text: str
    depth: int
    steps: int
    name: str
    bits_per_byte: float
    baseline: float  # bits per byte
    flops: Interval | None
    seconds: Interval | None


def measure(
    template: Run, baseline: Entry, candidates: Sequence[Entry], cfg: Config, runs: Runs
) -> list[Figure]:
    """Train everything on the template's text at its depth, seed after seed, and compare."""

    def result_of(compared: Entry, steps: int, seed: int) -> Result:
        variant = compared.variant
        if variant.side == "upstream":
            variant = replace(variant, scale=cfg.scale or (2.0 if steps <= SHORT else 1.0))
        plan = replace(template.plan, horizon=steps, seed=seed)
        return runs(replace(template, entry=Entry(compared.name, variant), plan=plan))

    base: dict[int, list[Result]] = {length: [] for length in cfg.lengths}
    results_of: dict[tuple[str, int], list[Result]] = {
        (other.name, steps): [] for steps in sorted(cfg.steps) for other in candidates
    }
    # Sides alternate, so that a busy hour of the machine does not fall on one of them.
    for seed in cfg.seeds:
        for length, results in base.items():
            results.append(result_of(baseline, length, seed))
            if length in cfg.steps:
                for other in candidates:
                    results_of[other.name, length].append(result_of(other, length, seed))
    return [
        Figure(
            text=template.text,
            depth=template.depth,
            steps=steps,
            name=name,
            bits_per_byte=fmean(result.bits_per_byte for result in results),
            baseline=fmean(result.bits_per_byte for result in base[steps]),
            flops=multiplier_of("flops", seeds),
            seconds=multiplier_of("seconds", seeds),
        )
        for (name, steps), results in results_of.items()
        for seeds in [list(zip(results, *base.values(), strict=True))]
    ]


def show(figures: Sequence[Figure], baseline: str) -> None:
    """Print one line per figure."""
    titles = ("text, depth, steps", "variant", "bits/byte", baseline)
    rows = []
    for figure in figures:
        row = [
            f"{figure.text}, d{figure.depth}, {figure.steps}",
            figure.name,
            f"{figure.bits_per_byte:.4f}",
            f"{figure.baseline:.4f}",
            figure.flops.words if figure.flops else "no slope",
            figure.seconds.words if figure.seconds else "no slope",
        ]
        rows.append(row)
    tables.show((*titles, "multiplier, FLOPs", "CPU seconds"), rows)


def our_variant(quick: bool) -> tuple[Variant, bool]:
    """Return how our side trains on this host, and whether upstream's side can be compiled."""
    compute = device.compute_init("cpu")
    host.use_compile_cache(base_dir())  # both sides compile into this folder
    missing = device.compiler_missing(compute)
    if missing:
        log(f"nothing is compiled: {missing}")
    dtype = compute.platform.best_dtype()[0]
    # Our step is compiled where base_train compiles it, and upstream's if there is a compiler.
    kernels_are_faster = compute.operations.needs_no_compiler(HEAD_DIM, dtype)
    compiled = not (missing or kernels_are_faster or quick)
    return Variant("ours", dtype_name(dtype), compiled), not missing


def texts_of(cfg: Config) -> tuple[str, ...]:
    """Return the names of the texts to train on."""
    return ("code", "documents") if cfg.corpus else ("code",)


def plan_of(sizes: Sizes, depth: int, rows: Path, **settings: int) -> Plan:
    """Return the plan of a run of a depth, without its length and its seed unless given."""
    shape = sizes.shape(depth)
    return Plan(shape, rows, sizes.rows_per_step, warmup=0, held_out=sizes.held_out, **settings)


def climb_ladder(cfg: Config) -> None:
    """Train runs of the ladder that are missing, given upstream's code; then print its table."""
    trained = 0
    checkout = cfg.upstream
    if checkout is not None:
        check_peers(False, (), checkout)
        ours, upstream_compiled = our_variant(quick=False)
        upstream = replace(ours, side="upstream", compiled=upstream_compiled)
        sizes = Sizes()
        out = base_dir() / "multiplier"
        rows = {
            text: rows_of(
                text, replace(cfg, steps=ladder.lengths_on(text), stretch=(1.0,)), sizes, out
            )
            for text in texts_of(cfg)
        }
        planned = [
            Run(
                rung.text, rung.depth, entry, plan_of(sizes, rung.depth, rows[rung.text], **numbers)
            )
            for rung in ladder.RUNGS
            if rung.text in rows
            for entry, numbers in ladder.runs_of(
                rung, Entry("ours", ours), Entry("upstream", upstream)
            )
        ]
        recipes = {
            "ours": ladder.our_recipe(),
            "upstream": ladder.upstream_recipe(checkout, upstream),
        }
        train = Runs(out / "runs", checkout).train
        trained = ladder.climb(planned, recipes, train, cfg.hours)
    results = ladder.figures(ladder.read_records())
    ladder.show(results)
    summary = {"trained": trained, "figures": [asdict(result) for result in results]}
    tables.finish("multiplier_ladder", summary)


def main(cfg: Config) -> None:
    """Train what is missing, and print the table and the JSON object."""
    if cfg.ladder:
        check_ladder(cfg)
        climb_ladder(cfg)
        return
    check(cfg)
    sizes = Sizes()
    if cfg.quick:
        cfg = replace(cfg, corpus=None, depths=(2,), steps=(24,), seeds=(1, 2))
        sizes = QUICK
    ours, upstream_compiled = our_variant(cfg.quick)
    baseline, candidates = entries(cfg, ours, upstream_compiled)
    out = base_dir() / "multiplier"
    runs = Runs(out / "runs", cfg.upstream)
    figures: list[Figure] = []
    rows = {text: rows_of(text, cfg, sizes, out) for text in texts_of(cfg)}
    for depth, text in itertools.product(sorted(cfg.depths), rows):
        template = Run(text, depth, baseline, plan_of(sizes, depth, rows[text]))
        figures += measure(template, baseline, candidates, cfg, runs)
    log(f"{len(cfg.seeds)} seeds; standard errors over seeds; ?: beyond the baseline's curve")
    show(figures, baseline.name)
    result = {
        "baseline": baseline.name,
        "seeds": list(cfg.seeds),
        "trained": runs.trained,
        "figures": [asdict(figure) for figure in figures],
    }
    tables.finish("multiplier", result)


if __name__ == "__main__":
    run(main, Config, __doc__)
