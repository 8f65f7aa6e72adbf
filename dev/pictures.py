"""Makes the README's pictures from a finished run, and prints the rows of its table of results.

python -m dev.pictures --base ~/.cache/nanochat                              # the pages and the curves
python -m dev.pictures --base ~/.cache/nanochat --tokenizer bench.json       # and the bars of bench.tokenizer
python -m dev.pictures --base DIR --only chat --tag speedrun

The pictures are small enough to commit. docs/pictures/ afterwards holds chat.png, compare.png,
curves.png, runs.png and tokenizer.png for light pages, and NAME-dark.png for dark ones. The pages
need Chromium on the PATH. The bars need the output of `python -m bench.tokenizer` with --against.
dev/ladder_picture.py makes the picture of the ladder.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dev.house import ROOT
from nanochat.common import write_atomic

FOLDER = ROOT / "docs" / "pictures"
MOST_BYTES = 320_000  # of all pictures of the README together, including the floor plan

QUESTIONS = ("What is the capital of France?", "法国的首都是哪里？", "What is 37 * 48?")
TO_COMPARE = "Tell me about the moon."  # only fine-tuning teaches a model what it cannot answer
WIDTH, LEAST_HEIGHT = 860, 560  # the size of the page, in CSS pixels
RUNS_WIDTH, COMPARE_WIDTH = 1060, 1000
TO_THE_FOURTH_CHART = (
    "() => Math.ceil(document.querySelectorAll('.chart')[3].getBoundingClientRect().bottom) + 20"
)
OTHERS = ("runs", "compare", "ladder")  # of docs/runs.md, docs/chat.md and docs/reference.md
SCALE = 2  # pixels of a picture per pixel of its page
STAGES = {"base": "base", "mid": "mid", "sft": "chatsft", "rl": "chatrl"}
TITLES = {"base": "base", "mid": "mid", "sft": "SFT", "rl": "RL"}
PEERS = {"rustbpe": "karpathy/rustbpe", "tokenizers": "HF tokenizers", "tiktoken": "tiktoken"}
BARS = {
    "train": "training",
    "train_zh": "training, Chinese",
    "encode": "encoding",
    "encode_zh": "encoding, Chinese",
}
MEASURES = (
    "tinyworld_en",
    "tinyworld_zh",
    "calculator",
    "mental",
)  # the columns of the table of results
FROM_TOP_TO_BOTTOM = """() => {
  const scroller = document.querySelector("#scroller");
  return window.innerHeight - scroller.clientHeight + scroller.scrollHeight;
}"""


@dataclass(frozen=True)
class Theme:
    """The colours of a picture, and the colour scheme of the browser that shows the page."""

    suffix: str
    scheme: str
    page: str
    text: str
    soft: str
    line: str
    stages: dict[str, str]


LIGHT = Theme(
    "",
    "light",
    "#ffffff",
    "#1d1f21",
    "#6a6d70",
    "#e3e0d9",
    {"base": "#0c7c72", "mid": "#c27a12", "sft": "#6c56c9", "rl": "#c0405a"},
)
DARK = Theme(
    "-dark",
    "dark",
    "#0d1117",
    "#e8e8e6",
    "#9aa0a4",
    "#31363a",
    {"base": "#4fc3b0", "mid": "#e0a54a", "sft": "#a493f0", "rl": "#f0788e"},
)
THEMES = (LIGHT, DARK)


def save(name: str, png: bytes, colours: int) -> None:
    """Write a picture with a palette of `colours` colours, which takes a fraction of the bytes."""
    from PIL import Image

    reduced = Image.open(io.BytesIO(png)).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    reduced.save(buffer, "PNG", optimize=True)
    write_atomic(FOLDER / f"{name}.png", buffer.getvalue())
    print(f"{name}.png: {len(buffer.getvalue()):,} bytes")


# --- the chat page -------------------------------------------------------------------------------


@contextmanager
def serving(base: Path, *flags: str) -> Iterator[str]:
    """Run chat_web with these flags on a base folder, and yield its address.

    The server ends with the context. Exits with the server's last output if it does not start.
    """
    command = [sys.executable, "-u", "-m", "scripts.chat_web", "--port", "0", *flags]
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base)}
    with subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        output = []
        try:
            for line in server.stdout or ():
                output.append(line)
                if match := re.search(r"http://127\.0\.0\.1:\d+", line):
                    yield match[0]
                    return
            sys.exit("the chat server did not start:\n" + "".join(output[-5:]))
        finally:
            server.terminate()


def ask(page: Any, question: str, answer_number: int) -> None:
    """Type a question and wait until its answer is complete."""
    from playwright.sync_api import expect

    page.fill("#prompt", question)
    page.press("#prompt", "Enter")
    page.locator(".turn.model .meta").nth(answer_number).wait_for()
    expect(page.locator(".body.streaming")).to_have_count(0, timeout=60_000)


def pages(url: str, width: int, scale: int) -> Iterator[tuple[Theme, Any]]:
    """Yield each theme with the page at a URL, in a new browser window of that theme."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit(
            "chromium is not on the PATH; install it: apt-get install chromium fonts-wqy-zenhei"
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for theme in THEMES:
            context = browser.new_context(
                viewport={"width": width, "height": LEAST_HEIGHT},
                device_scale_factor=scale,
                color_scheme=theme.scheme,
                locale="en-US",
            )
            page = context.new_page()
            page.goto(url)
            yield theme, page
            context.close()
        browser.close()


def chat(base: Path, tag: str | None) -> None:
    """Photograph a chat in both languages, with the call of the calculator unfolded."""
    with serving(base, *(["-g", tag] if tag else [])) as url:
        for theme, page in pages(url, WIDTH, SCALE):
            for answer_number, question in enumerate(QUESTIONS):
                ask(page, question, answer_number)
            if page.locator("details.tool summary").count():
                page.locator("details.tool summary").last.press(
                    "Enter"
                )  # a click would leave the mouse on a button
            page.evaluate("() => document.activeElement.blur()")
            page.set_viewport_size({"width": WIDTH, "height": page.evaluate(FROM_TOP_TO_BOTTOM)})
            page.wait_for_timeout(500)  # until fades and scrolling have ended
            save(f"chat{theme.suffix}", page.screenshot(), 64)


def compare(base: Path, tag: str | None) -> None:
    """Photograph the answers of the newest model and the midtrained one to the same question."""
    name = tag or trained_tag(base)
    with serving(base, "-g", name, "--also", f"mid/{name}") as url:
        for theme, page in pages(url, COMPARE_WIDTH, 1):
            page.locator("#model summary").click()
            page.locator(".panel .compare button").click()
            ask(page, TO_COMPARE, 1)
            page.evaluate("() => document.activeElement.blur()")
            page.set_viewport_size({"width": COMPARE_WIDTH, "height": LEAST_HEIGHT // 2})
            page.set_viewport_size(
                {"width": COMPARE_WIDTH, "height": page.evaluate(FROM_TOP_TO_BOTTOM)}
            )
            page.wait_for_timeout(500)
            save(f"compare{theme.suffix}", page.screenshot(), 64)


def trained_tag(base: Path) -> str:
    """Return the tag of the midtrained model that was saved last."""
    folders = sorted(
        (base / "mid_checkpoints").glob("*/"), key=lambda folder: folder.stat().st_mtime
    )
    return (
        folders[-1].name
        if folders
        else sys.exit(f"{base} has no midtrained model: give the base folder of a run")
    )


def runs(base: Path) -> None:
    """Photograph the page of training runs, with the curves of all stages."""
    with serving(base, "--runs_only") as url:
        for theme, page in pages(f"{url}/runs", RUNS_WIDTH, 1):
            page.locator(".chart .curve").first.wait_for()
            for box in page.get_by_role("checkbox").all()[: len(STAGES)]:
                box.check()
            page.evaluate("() => document.activeElement.blur()")
            page.wait_for_timeout(3000)  # until the figures of all runs have arrived
            page.set_viewport_size(
                {"width": RUNS_WIDTH, "height": page.evaluate(TO_THE_FOURTH_CHART)}
            )
            page.wait_for_timeout(500)
            save(f"runs{theme.suffix}", page.screenshot(), 128)


# --- the curves ----------------------------------------------------------------------------------


def metrics(base: Path, stage: str, tag: str | None) -> list[dict[str, Any]]:
    """Return the lines that a stage logged under a tag, or under its newest tag if `tag` is None.

    The list is empty if the stage never ran.
    """
    folder = base / f"{STAGES[stage]}_checkpoints"
    files = [folder / tag / "metrics.jsonl"] if tag else list(folder.glob("*/metrics.jsonl"))
    files = sorted((file for file in files if file.exists()), key=lambda file: file.stat().st_mtime)
    return (
        [json.loads(line) for line in files[-1].read_text(encoding="utf-8").splitlines()]
        if files
        else []
    )


def smoothed(values: Sequence[float], share: float = 0.9) -> list[float]:
    """Return a running mean of values, in which each new value weighs 1 - share.

    The first values all weigh the same, so that the mean does not start slowly.
    """
    means: list[float] = []
    mean = 0.0
    for index, value in enumerate(values):
        weight = max(1 - share, 1 / (index + 1))
        mean += weight * (value - mean)
        means.append(mean)
    return means


def plain(axes: Any, theme: Theme, title: str) -> None:
    """Give axes a title, a light grid and whole numbers of steps, and remove their box."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(title, loc="left", color=theme.text, fontsize=9.5, pad=10)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=theme.line, linewidth=0.7)
    axes.tick_params(colors=theme.soft, labelsize=8, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.set_xlabel("step", color=theme.soft, fontsize=8)
    for side in axes.spines.values():
        side.set_visible(False)


def mark(axes: Any, x: float, y: float, words: str, colour: str, side: str = "above") -> None:
    """Label a curve in its colour, above a point of the curve or to the right of it."""
    offset = (
        {"xytext": (0, 5), "ha": "center"} if side == "above" else {"xytext": (7, -3), "ha": "left"}
    )
    axes.annotate(words, (x, y), textcoords="offset points", color=colour, fontsize=8.5, **offset)


def draw_losses(axes: Any, stage_lines: dict[str, list[dict[str, Any]]], theme: Theme) -> None:
    """Draw the training losses of base, mid and SFT, one after another."""
    start = 0
    for stage in ("base", "mid", "sft"):
        lines = stage_lines[stage]
        if lines:
            steps, values = (
                [start + line["step"] for line in lines],
                [line["smooth_loss"] for line in lines],
            )
            axes.plot(steps, values, color=theme.stages[stage], linewidth=1.6)
            mark(
                axes,
                (steps[0] + steps[-1]) / 2,
                max(values[len(values) // 3 :]),
                TITLES[stage],
                theme.stages[stage],
            )
            start = steps[-1]
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    ticks = [tick for tick in (0.01, 0.03, 0.1, 0.3, 1, 3, 10) if low <= tick <= high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def draw_bits(axes: Any, stage_lines: dict[str, list[dict[str, Any]]], theme: Theme) -> None:
    """Draw the bits per byte of held-out text.

    The text is documents for base, and conversations for mid and SFT.
    """
    for stage in ("base", "mid", "sft"):
        points = [
            (line["step"], line["val_bpb"]) for line in stage_lines[stage] if "val_bpb" in line
        ]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(
                steps, values, color=theme.stages[stage], linewidth=1.6, marker="o", markersize=3.5
            )
            mark(
                axes,
                steps[-1],
                values[-1],
                f"{TITLES[stage]} {values[-1]:.3f}",
                theme.stages[stage],
                "right",
            )
    axes.margins(y=0.15)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.35)  # room for the labels
    axes.set_ylim(bottom=0)


def draw_rewards(axes: Any, lines: list[dict[str, Any]], theme: Theme) -> None:
    """Draw the share of right answers in RL, for sampled replies and for held-out problems."""
    sampled = [(line["step"], line["reward"]) for line in lines if "reward" in line]
    held_out = [(line["step"], line["accuracy"]) for line in lines if "accuracy" in line]
    colour = theme.stages["rl"]
    if sampled:
        steps, values = zip(*sampled, strict=True)
        axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.3)
        axes.plot(steps, smoothed(values, 0.95), color=colour, linewidth=1.6)
        axes.text(
            0.02, 0.93, "sampled, smoothed", color=colour, fontsize=8.5, transform=axes.transAxes
        )
    if held_out:
        steps, values = zip(*held_out, strict=True)
        axes.plot(steps, values, color=theme.text, linewidth=1.2, marker="o", markersize=3.5)
        axes.text(
            0.02, 0.85, "greedy, held out", color=theme.text, fontsize=8.5, transform=axes.transAxes
        )
    axes.margins(y=0.3)


def curves(base: Path, tag: str | None) -> None:
    """Draw the loss, the bits per byte and the reward of a run's stages."""
    from matplotlib.figure import Figure

    stage_lines = {stage: metrics(base, stage, tag) for stage in STAGES}
    if not any(stage_lines.values()):
        sys.exit(f"{base} holds no metrics.jsonl; give the base folder of a run that has trained")
    panels = [
        ("training loss (log scale)", lambda axes, theme: draw_losses(axes, stage_lines, theme)),
        ("bits per byte of held-out text", lambda axes, theme: draw_bits(axes, stage_lines, theme)),
    ]
    if stage_lines["rl"]:
        panels.append(
            (
                "RL: share of right answers",
                lambda axes, theme: draw_rewards(axes, stage_lines["rl"], theme),
            )
        )
    for theme in THEMES:
        figure = Figure(figsize=(9.2, 2.9), layout="constrained", facecolor=theme.page)
        for axes, (title, draw) in zip(figure.subplots(1, len(panels)), panels, strict=True):
            plain(axes, theme, title)
            draw(axes, theme)
        picture(f"curves{theme.suffix}", figure)


def picture(name: str, figure: Any) -> None:
    """Save a matplotlib figure as a picture."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100 * SCALE)
    save(name, buffer.getvalue(), 48)


# --- the tokenizer -------------------------------------------------------------------------------


def ratios(result: dict[str, Any]) -> list[tuple[str, str, float]]:
    """Return (task, peer, how many times as fast as the peer) from a result of bench.tokenizer."""
    return [
        (title, PEERS[peer], float(result[f"{kind}_vs_{peer}"]))
        for kind, title in BARS.items()
        for peer in PEERS
        if result.get(f"{kind}_vs_{peer}")
    ]


def tokenizer(file: Path) -> None:
    """Draw how many times as fast as its peers the tokenizer is.

    The figures come from the last JSON line of a file.
    """
    from matplotlib.figure import Figure

    result = json.loads(
        [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("{")][-1]
    )
    bars = ratios(result)
    if not bars:
        sys.exit(
            f"{file} compares with nobody; measure with: python -m bench.tokenizer --against rustbpe tiktoken"
        )
    for theme in THEMES:
        figure = Figure(
            figsize=(9.2, 0.75 + 0.31 * len(bars)), layout="constrained", facecolor=theme.page
        )
        axes = figure.subplots()
        threads = "one thread" if result.get("threads", 1) == 1 else f"{result['threads']} threads"
        plain(
            axes, theme, f"times as fast as other tokenizers (CPU seconds side by side, {threads})"
        )
        positions = range(len(bars), 0, -1)
        colours = [
            theme.stages["base" if title.startswith("training") else "sft"] for title, _, _ in bars
        ]
        axes.barh(positions, [times for _, _, times in bars], color=colours, height=0.62)
        axes.set_yticks(positions, [f"{title} vs {whom}" for title, whom, _ in bars])
        for position, (_, _, times) in zip(positions, bars, strict=True):
            axes.annotate(
                f"{times:.1f}",
                (times, position),
                (4, 0),
                textcoords="offset points",
                va="center",
                color=theme.text,
                fontsize=8.5,
            )
        axes.axvline(1, color=theme.soft, linewidth=1, linestyle=(0, (2, 2)))
        axes.grid(visible=False)
        axes.set_xlabel("")
        axes.set_xticks([1], ["1 = as fast"])
        axes.margins(x=0.08, y=0.02)
        picture(f"tokenizer{theme.suffix}", figure)


# --- the table of results ------------------------------------------------------------------------


def results(base: Path) -> list[str]:
    """Return the rows of the README's table of results, with accuracies and 95 % intervals.

    They come from the report of a finished run.
    """
    file = base / "report" / "report.json"
    if not file.exists():
        return [f"no {file} yet: the table of results needs a finished run"]
    sections = json.loads(file.read_text(encoding="utf-8"))["sections"]
    rows = []
    for stage in ("mid", "sft", "rl"):
        tasks = sections.get(f"{stage}_eval", {}).get("tasks", {})
        cells = [percent(tasks[name]) if name in tasks else "" for name in MEASURES]
        if any(cells):
            rows.append("| " + " | ".join([f"after {TITLES[stage]}", *cells]) + " |")
    return rows


def percent(score: dict[str, float]) -> str:
    """Return a score as text, such as 97.7 % (96.3–98.6)."""
    return f"{100 * score['accuracy']:.1f} % ({100 * score['low']:.1f}–{100 * score['high']:.1f})"


def size() -> int:
    """Return the total size of the README's pictures, in bytes.

    OTHERS do not count, because they are in the guides.
    """
    files = [*FOLDER.glob("*.png"), *FOLDER.parent.glob("architecture-*.svg")]
    return sum(file.stat().st_size for file in files if not file.name.startswith(OTHERS))


def main() -> None:
    """Make the requested pictures, and check that all pictures together are small enough."""
    parser = argparse.ArgumentParser(
        description="Make the pictures of the README from a finished run."
    )
    parser.add_argument(
        "--base", type=Path, required=True, metavar="DIR", help="base folder of the run"
    )
    parser.add_argument("--tag", help="tag of the model, such as speedrun; default: the newest")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="output of bench.tokenizer, with its JSON line",
    )
    parser.add_argument(
        "--only",
        choices=("chat", "compare", "curves", "runs", "tokenizer"),
        help="make this picture alone",
    )
    flags = parser.parse_args()
    base = flags.base.expanduser()
    if flags.only in (None, "chat"):
        chat(base, flags.tag)
    if flags.only in (None, "compare"):
        compare(base, flags.tag)
    if flags.only in (None, "curves"):
        curves(base, flags.tag)
    if flags.only in (None, "runs"):
        runs(base)
    if flags.tokenizer and flags.only in (None, "tokenizer"):
        tokenizer(flags.tokenizer)
    print("\n".join(results(base)))
    if size() > MOST_BYTES:
        sys.exit(
            f"the pictures have {size():,} bytes, at most {MOST_BYTES:,}: fewer colours, or a smaller page"
        )


if __name__ == "__main__":
    main()
