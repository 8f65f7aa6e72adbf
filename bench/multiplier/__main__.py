"""Measures how much more a baseline must spend to reach our loss: compute multipliers, with intervals over seeds.

python -m bench.multiplier --quick                                     # ours beside AdamW; 50 seconds, needs no peer
python -m bench.multiplier --upstream DIR --corpus DIR                 # DIRs: a checkout of karpathy/nanochat, and
                                                                       # texts made by python -m bench.corpus DIR
python -m bench.multiplier --baseline ours --variants "hot=--matrix_lr=0.03"        # does a change help?
python -m bench.multiplier --baseline ours --variants "bigrams=--bigram_rows=65536"
python -m bench.multiplier --baseline ours --variants "ema=--checkout=../with-ema"  # a change in another checkout

The definition is the one of scripts/compare.py on karpathy/nanochat's branch experiment_refactor: the multiplier is
what the baseline spends to reach the final loss of our run, divided by what our run spent. Above 1, ours is better. The
baseline's cost is read off its curve, which is piecewise linear in the logarithms of cost and loss. Where the loss lies
beyond the curve, its last segment is continued, and the figure has a question mark.

Unlike that branch, we do not read the cost off the middle of a run, because its learning rate has not fallen yet, so
the curve would flatter us. Instead the baseline is trained from the start to each of several lengths, --steps times
--stretch, and the curve goes through the ends of these runs. Cost is counted twice: in FLOPs, which depend on the shape
and the tokens alone and are the same for both sides, and in CPU seconds of the steps.

Both sides read the same rows of the same tokenizer in the same order, 4,096 tokens a step, and are measured in bits per
byte of rows that nothing trained on. Upstream's rule for the batch would make its learning rates far too low at so few
tokens, so its rates are multiplied by a factor that is searched for at each --steps with the first seed, as bench.train
does; all of upstream's runs then use the best. Ours follows base_train's rules as they are: a run that reads its text
more than twice has no table of pairs. Seeds are paired: with the same seed both sides read the same order of rows. Each
seed gives one multiplier; the table shows their geometric mean and its standard error, and the JSON object the interval
of 95 % by Student's t as well.

A run's curve is a file in --out that is named by all of its settings: its code, torch's version, the number format and
the rows are among them. Typed again, the command trains only what is missing; a run that was stopped resumes where it
was last saved, which it is every 100 steps. Rows that were made of another corpus are refused.
"""

import json
import random
import re
import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal

import torch

from bench import corpus
from bench.multiplier.curves import Interval, multiplier
from bench.multiplier.picture import Line, draw
from bench.multiplier.runs import GIGA, LOOP, OURS, Entry, Result, Run, Runs, tuned
from bench.train.rows import ABOUT, Text, check_rows, make_rows, standard_library
from bench.train.worker import Plan, Variant
from bench.upstream import check_checkout
from nanochat import device
from nanochat.common import UserError, base_dir, log, read_json, run, write_json
from nanochat.gpt import GPTConfig
from nanochat.platforms import host
from nanochat.runtime.progress import Progress

HEAD_DIM = 64  # a model has 64 channels per layer, as upstream's dial gives
EPOCHS = 4  # more passes over the rows than this would measure how a model learns them by heart
PIECE = 10_000  # characters
HELD_OUT = 128  # rows
# What base_train's flags can change in such a run; the other flags set other sizes, data and files.
APPLIED = (
    "unembedding_lr",
    "embedding_lr",
    "matrix_lr",
    "matrix_optimizer",
    "scalar_lr",
    "weight_decay",
    "warmup_steps",
    "warmdown_ratio",
    "final_lr_frac",
    "bigram_rows",
    "offset_layers",
)


@dataclass(frozen=True)
class Sizes:
    """What all runs of one call have in common."""

    length: int = 512  # tokens of a row
    vocab_size: int = 4096
    rows_per_step: int = 8
    held_out: int = HELD_OUT

    def shape(self, depth: int) -> GPTConfig:
        """A model of this depth that sees whole rows: d4 is the model of bench.train."""
        return GPTConfig(self.length, self.vocab_size, depth, depth, depth, HEAD_DIM * depth, "L")


QUICK = Sizes(128, 1024, 8, 32)


@dataclass(frozen=True)
class Config:
    """Print compute multipliers as a table, and as one JSON object on the last line."""

    quick: bool = False
    """compare ours with AdamW on the matrices, on two layers for a few steps: shows that the method works"""
    upstream: Path | None = None
    """folder of a checkout of karpathy/nanochat, which is then the baseline"""
    baseline: str | None = None
    """what the others are compared with: upstream, ours, or a name from --variants; default: upstream if it is given"""
    variants: tuple[str, ...] = ()
    """changes of ours to measure beside it, each as NAME=FLAGS: flags of base_train for rates, schedule and bigrams,
    separated by spaces, and --checkout=DIR for the code of another checkout of this repository"""
    texts: tuple[Literal["code", "documents"], ...] = ("code", "documents")
    """texts to train on: Python's standard library, or Debian's documents in English and Chinese"""
    corpus: Path | None = None
    """folder made by `python -m bench.corpus DIR`, for --texts documents"""
    depths: tuple[int, ...] = (4,)
    """layers of the models, with 64 channels per layer"""
    steps: tuple[int, ...] = (200,)
    """lengths of the runs that are compared, in steps of 4,096 tokens"""
    stretch: tuple[float, ...] = (1.0, 2.0)
    """lengths of the baseline's runs, as multiples of --steps: its curve must reach our loss, or is continued"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of weights and row order; the interval needs at least three"""
    scales: tuple[float, ...] = (1.0, 2.0)
    """factors on upstream's learning rates to try first; more are tried until the best lies between two others"""
    search: bool = True
    """--no-search: take the first of --scales for all of upstream's runs, and try no other"""
    megabytes: tuple[float, ...] = (5.0,)
    """MB of English and of Chinese in the text documents, or one number for both; longer runs need more"""
    out: Path | None = None
    """folder for the rows, a file for each run, the figures and the picture; default: multiplier in the base folder"""


def refuse(message: str) -> UserError:
    """A mistake on the command line."""
    return UserError(message, exit_code=2)


def check(cfg: Config) -> None:
    """Raise UserError for flags that cannot be measured."""
    if cfg.quick and (cfg.upstream or cfg.baseline or cfg.variants):
        raise refuse(
            "--quick compares ours with AdamW alone; leave out --quick, or --upstream, --baseline, --variants"
        )
    if cfg.upstream is not None:
        check_checkout("--upstream", cfg.upstream)
    for flag in ("texts", "depths", "steps", "seeds", "stretch", "scales"):
        given = getattr(cfg, flag)
        least = 0 if flag == "seeds" else 1 if flag in ("depths", "steps") else None
        if not given or len(set(given)) < len(given):
            raise refuse(
                f"--{flag} must be one or more different values, got {' '.join(map(str, given)) or 'none'}"
            )
        if flag != "texts" and (min(given) <= 0 if least is None else min(given) < least):
            rule = "above 0" if least is None else f"at least {least}"
            raise refuse(f"--{flag} must be {rule}, got {' '.join(map(str, given))}")
    if len(cfg.megabytes) not in (1, 2) or min(cfg.megabytes) <= 0:
        raise refuse(
            f"--megabytes must be one or two numbers above 0, got {' '.join(map('{:g}'.format, cfg.megabytes))}"
        )
    if len(cfg.stretch) < 2 and len(cfg.steps) < 2:
        raise refuse(
            "a curve needs two lengths of the baseline's runs; give two numbers to --stretch or to --steps"
        )
    if "documents" in cfg.texts and cfg.corpus is None and not cfg.quick:
        raise refuse(
            "--texts documents needs --corpus DIR, a folder made by `python -m bench.corpus DIR`; or give --texts code"
        )


def entry(words: str, ours: Variant) -> Entry:
    """A variant of ours from NAME=FLAGS; UserError if the name, a flag or the checkout cannot be used."""
    name, _, rest = words.partition("=")
    if not re.fullmatch(r"[a-z0-9_]+", name) or name in ("ours", "upstream"):
        raise refuse(
            f"--variants takes NAME=FLAGS with a name of small letters, digits and _, got {words!r}"
        )
    flags, checkout = [], None
    for flag in rest.split():
        key, _, value = flag.removeprefix("--").partition("=")
        if key == "checkout" and value:
            checkout = Path(value)
            if missing := [part for part in (*OURS, LOOP) if not (checkout / part).exists()]:
                raise refuse(
                    f"variant {name}: {checkout} is no checkout of this repository: it has no {missing[0]}"
                )
        elif flag.startswith("--") and value and key.replace("-", "_") in APPLIED:
            flags.append(f"--{key.replace('-', '_')}={value}")
        else:
            raise refuse(
                f"variant {name} may have the flags --checkout=DIR and --{'=, --'.join(APPLIED)}=, got {flag!r}"
            )
    if not flags and checkout is None:
        raise refuse(
            f"variant {name} changes nothing; give at least one flag, such as {name}=--matrix_lr=0.03"
        )
    return Entry(name, replace(ours, flags=tuple(flags), checkout=checkout))


def entries(cfg: Config, ours: Variant, compiled: bool) -> tuple[Entry, list[Entry]]:
    """The baseline, and what is compared with it; `compiled`: whether upstream is, where ours may need no compiler."""
    if cfg.quick:
        return Entry("adamw", replace(ours, flags=("--matrix_optimizer=adamw",))), [
            Entry("ours", ours)
        ]
    known = {"ours": Entry("ours", ours)}
    if cfg.upstream is not None:
        known["upstream"] = Entry("upstream", replace(ours, side="upstream", compiled=compiled))
    for words in cfg.variants:
        made = entry(words, ours)
        if made.name in known:
            raise refuse(f"--variants has two entries with the name {made.name}; give each its own")
        known[made.name] = made
    name = cfg.baseline or ("upstream" if cfg.upstream is not None else "")
    if name not in known:
        asked = f"got {name}" if name else "none was given"
        raise refuse(
            f"--baseline must be one of {', '.join(known)}, {asked}; upstream needs --upstream DIR"
        )
    others = [one for one in known.values() if one.name not in (name, "upstream")]
    if not others:
        raise refuse(f"nothing is compared with the baseline {name}; give --variants NAME=FLAGS")
    return known[name], others


def documents(folder: Path | None, megabytes: Sequence[float]) -> Text:
    """Pieces of English and Chinese documents in turn, that many MB of each language, or of both if there is only one
    number; UserError if the corpus has too few."""
    assert folder is not None
    parts, wanted = [], {"english": megabytes[0], "chinese": megabytes[-1]}
    for kind, size in wanted.items():
        whole = corpus.read_kind(folder, kind)
        pieces = dict.fromkeys(
            text[at : at + PIECE] for text in whole for at in range(0, len(text), PIECE)
        )
        spoken = [
            piece for piece in pieces if len(piece) >= PIECE // 10 and corpus.speaks(kind, piece)
        ]
        random.Random(0).shuffle(spoken)
        sizes = list(accumulate(len(piece.encode()) for piece in spoken))
        if not sizes or sizes[-1] < 1e6 * size:
            raise UserError(
                f"{folder / kind}.txt must hold {size:g} MB of text in the language, got "
                f"{sizes[-1] / 1e6 if sizes else 0:.1f} MB; make a larger corpus with python -m bench.corpus",
                2,
            )
        parts.append(spoken[: bisect_left(sizes, 1e6 * size) + 1])
    mixed = [part[i] for i in range(max(map(len, parts))) for part in parts if i < len(part)]
    each = " and ".join(f"{size:g} MB of {kind.capitalize()}" for kind, size in wanted.items())
    return Text(mixed, f"Debian's documents, {each}")


def rows_of(text: str, cfg: Config, sizes: Sizes, folder: Path, longest: int) -> Path:
    """The folder with the rows of a text, made if it is missing; UserError (code 2) if its rows are those of another
    text, or too few for the longest run."""
    found = (
        standard_library(500_000 if cfg.quick else None)
        if text == "code"
        else documents(cfg.corpus, cfg.megabytes)
    )
    made_of = read_json(folder / ABOUT).get("text_sha256") if (folder / ABOUT).exists() else None
    if (
        made_of is None
    ):  # there are no rows, or those of an earlier version, which did not say what they are made of
        log(f"making rows of {found.about}")
        make_rows(folder, sizes.vocab_size, sizes.length, found)
    elif made_of != found.sha256:
        raise refuse(
            f"the rows in {folder} must be made of {found.about}, with the SHA-256 {found.sha256[:16]}, got rows of a "
            f"text with {made_of[:16]}: the corpus or Python has changed. To compare runs on the text of today, give "
            f"another --out, or delete {folder}"
        )
    about = check_rows(folder, sizes.vocab_size, sizes.length)
    train, read = about["rows"] - sizes.held_out, longest * sizes.rows_per_step
    if read > EPOCHS * train:
        raise refuse(
            f"the text {text!r} must have at least {-(-read // EPOCHS):,} rows to train on, so that a run of "
            f"{longest:,} steps reads none more than {EPOCHS} times, got {max(train, 0):,}; give a larger text, or "
            "fewer --steps or a smaller --stretch"
        )
    log(
        f"{text}: {about['rows']:,} rows, {read / train:.2f} passes in the longest run; {about['text']}"
    )
    return folder


@dataclass(frozen=True)
class Figure:
    """One line of the table: an entry at one length beside the baseline of the same length."""

    text: str
    depth: int
    steps: int
    name: str
    bits_per_byte: float
    baseline: float
    difference: float  # ours minus the baseline's, mean over seeds
    difference_error: float | None  # standard error over seeds
    flops: Interval | None
    seconds: Interval | None
    scale: float  # factor on the baseline's learning rates


def measure_one(
    text: str,
    depth: int,
    plan: Plan,
    baseline: Entry,
    others: Sequence[Entry],
    cfg: Config,
    runs: Runs,
) -> tuple[list[Figure], list[Line]]:
    """Train everything on one text at one depth, seed after seed, and compare."""

    def one(who: Entry, steps: int, seed: int) -> Run:
        return Run(text, depth, who, replace(plan, horizon=steps, seed=seed))

    factors = {
        steps: tuned(runs, one(baseline, steps, cfg.seeds[0]), cfg.scales)
        if cfg.search
        else cfg.scales[0]
        for steps in sorted(cfg.steps)
    }
    lengths = sorted(
        {round(steps * stretch) for steps in cfg.steps for stretch in cfg.stretch} | set(cfg.steps)
    )
    scale_of = {
        n: factors[max((s for s in factors if s <= n), default=min(factors))] for n in lengths
    }
    base: dict[int, list[Result]] = {n: [] for n in lengths}
    own: dict[tuple[str, int], list[Result]] = {
        (who.name, n): [] for who in others for n in cfg.steps
    }
    for seed in (
        cfg.seeds
    ):  # sides alternate, so that a busy hour of the machine does not fall on one of them
        for n in lengths:
            base[n].append(runs(one(baseline, n, seed).scaled(scale_of[n])))
            if n in cfg.steps:
                for who in others:
                    own[who.name, n].append(runs(one(who, n, seed)))
    found = []
    for (name, n), results in own.items():
        over = {
            cost: multiplier(
                [r.point(cost) for r in results],
                [[base[m][i].point(cost) for m in lengths] for i in range(len(cfg.seeds))],
            )
            for cost in ("flops", "seconds")
        }
        apart = [r.end - b.end for r, b in zip(results, base[n], strict=True)]
        error = stdev(apart) / len(apart) ** 0.5 if len(apart) > 1 else None
        found.append(
            Figure(
                text,
                depth,
                n,
                name,
                fmean(r.end for r in results),
                fmean(b.end for b in base[n]),
                fmean(apart),
                error,
                over["flops"],
                over["seconds"],
                scale_of[n],
            )
        )
    panel = f"{text}, d{depth}"
    lines = [line(panel, baseline.name, list(base.values()))]
    lines += [
        line(panel, who.name, [own[who.name, n] for n in sorted(cfg.steps)]) for who in others
    ]
    return found, lines


def line(panel: str, name: str, lengths: Sequence[Sequence[Result]]) -> Line:
    """An entry's line of the picture, from its results at each length."""
    ends = []
    for results in lengths:
        bits = [result.end for result in results]
        ends.append(
            (
                results[0].flops[-1],
                fmean(bits),
                stdev(bits) / len(bits) ** 0.5 if len(bits) > 1 else 0.0,
            )
        )
    curves = [
        list(zip(r.flops, r.bits_per_byte, strict=True)) for results in lengths for r in results
    ]
    return Line(panel, name, ends, curves)


def table(figures: Sequence[Figure], baseline: str) -> str:
    """One line per figure."""
    lines = [
        f"{'text, depth, steps':<26}{'variant':<12}{'bits/byte':>10}{baseline:>10}{'difference':>19}"
        f"{'multiplier, FLOPs':>20}{'CPU seconds':>18}{'rates':>8}"
    ]
    for f in figures:
        error = "" if f.difference_error is None else f" ± {f.difference_error:.4f}"
        flops, seconds = (
            "no slope" if part is None else part.words for part in (f.flops, f.seconds)
        )
        lines.append(
            f"{f'{f.text}, d{f.depth}, {f.steps}':<26}{f.name:<12}{f.bits_per_byte:>10.4f}{f.baseline:>10.4f}"
            f"{f'{f.difference:+.4f}{error}':>19}{flops:>20}{seconds:>18}{f'x{f.scale:g}':>8}"
        )
    return "\n".join(lines)


def main(cfg: Config) -> None:
    """Train what is missing, and print the table and the JSON object."""
    check(cfg)
    if cfg.quick:
        cfg = replace(cfg, texts=("code",), depths=(2,), steps=(24,), seeds=(1, 2))
    torch.set_num_threads(1)
    compute = device.compute_init("cpu")
    host.use_compile_cache(base_dir())  # both sides compile into this folder
    missing = device.compiler_missing(compute)
    if missing:
        log(f"nothing is compiled: {missing}")
    dtype = compute.platform.best_dtype()[0]
    unneeded = compute.operations.needs_no_compiler(HEAD_DIM, dtype)
    ours = Variant(
        "ours", str(dtype).removeprefix("torch."), compiled=not (missing or unneeded or cfg.quick)
    )
    baseline, others = entries(cfg, ours, not missing)
    with tempfile.TemporaryDirectory() as temporary:
        default = Path(temporary) if cfg.quick else base_dir() / "multiplier"
        measure(cfg, QUICK if cfg.quick else Sizes(), baseline, others, cfg.out or default)


def measure(cfg: Config, sizes: Sizes, baseline: Entry, others: Sequence[Entry], out: Path) -> None:
    """Train and compare at every depth and on every text; the figures and the picture are written to `out`."""
    longest = max(round(steps * stretch) for steps in cfg.steps for stretch in (1.0, *cfg.stretch))
    named = {
        "code": "code",
        "documents": f"documents-{'+'.join(map('{:g}'.format, cfg.megabytes))}MB",
    }
    rows = {
        text: rows_of(
            text,
            cfg,
            sizes,
            out / "rows" / f"{named[text]}-{sizes.vocab_size}-{sizes.length}",
            longest,
        )
        for text in cfg.texts
    }
    peer = cfg.upstream.resolve() if cfg.upstream else None
    figures: list[Figure] = []
    lines: list[Line] = []
    with Progress("multiplier", total_of(cfg, sizes, baseline, others), "GFLOPs") as progress:
        runs = Runs(out / "runs", peer, progress)
        runs.folder.mkdir(parents=True, exist_ok=True)
        for depth in sorted(cfg.depths):
            for text in cfg.texts:
                plan = Plan(
                    sizes.shape(depth),
                    rows[text],
                    sizes.rows_per_step,
                    0,
                    0,
                    0,
                    held_out=sizes.held_out,
                )
                found, drawn = measure_one(text, depth, plan, baseline, others, cfg, runs)
                figures += found
                lines += drawn
                progress.say(table(found, baseline.name))
    log(
        f"{len(cfg.seeds)} seeds; multipliers with their standard errors over seeds; ?: beyond the baseline's curve"
    )
    log(table(figures, baseline.name))
    name = "-".join([baseline.name, *(who.name for who in others)])
    picture = out / f"{name}.png"
    draw(lines, picture)
    result: dict[str, Any] = {
        "benchmark": "multiplier",
        "baseline": baseline.name,
        "seeds": list(cfg.seeds),
        "trained": runs.trained,
        "picture": str(picture),
        "figures": [asdict(figure) for figure in figures],
    }
    write_json(out / f"{name}.json", result)
    print(json.dumps(result), flush=True)


def total_of(cfg: Config, sizes: Sizes, baseline: Entry, others: Sequence[Entry]) -> float:
    """The GFLOPs of all runs, if the search for the baseline's factor needs one more run than it begins with, and three
    at least: the best one and its neighbours."""
    lengths = {round(steps * stretch) for steps in cfg.steps for stretch in cfg.stretch} | set(
        cfg.steps
    )
    tried = max(len(cfg.scales) + 1, 3) - 1  # the best one is the first seed's run
    searched = tried * sum(cfg.steps) if baseline.variant.side == "upstream" and cfg.search else 0
    steps = searched + len(cfg.seeds) * (sum(lengths) + len(others) * sum(cfg.steps))
    total = 0.0
    for depth in cfg.depths:
        plan = Plan(sizes.shape(depth), Path(), sizes.rows_per_step, 0, 0, 0, horizon=steps)
        total += len(cfg.texts) * Run("", depth, baseline, plan).flops / GIGA
    return total


if __name__ == "__main__":
    run(main, Config, __doc__)
