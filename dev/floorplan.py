"""Draws the floor plan of nanochat/ from its imports, to docs/architecture-{light,dark}.svg.

python -m dev.floorplan            # writes both pictures
python -m dev.floorplan --check    # exits 1 if a picture is not what the code would draw today

A room is a folder or a file of nanochat/, and imports only rooms of lower floors (FLOORS in
dev/house.py). The sizes of rooms are rounded to hundreds of lines, so that a small edit does not
make the pictures stale.
"""

import argparse
import colorsys
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from dev.house import FLOOR, FLOORS, PACKAGE, ROOT, arrows, room_of, sources
from nanochat.common import write_atomic

FOLDER = ROOT / "docs"

# What each room is for, in a few words.
PURPOSES = {
    "common": "base folder, atomic files, messages, errors",
    "data": "conversations, corpora, downloads and command lines as plain data, without torch",
    "linear": "matrices and tables",
    "cache": "keys and values of sequences in flight",
    "attention": "plain attention and its masks",
    "loss": "cross-entropy in chunks",
    "muon": "the arithmetic of the optimizer Muon",
    "schedule": "how long, how large, how fast",
    "context": "what a forward pass knows beside its tokens",
    "model": "what every family of models offers",
    "models": "the published families",
    "platforms": "one class per vendor: what its devices do their own way",
    "device": "chooses the device, the ranks and the number format",
    "tokenizer": "text and chats to tokens, and back",
    "runtime": "around the computation: ranks, signals, progress, profiles",
    "gpt": "the model",
    "generate": "sampling and replies",
    "prepare": "token files, packed rows",
    "optim": "AdamW and Muon, and how ranks share them",
    "engine": "generates many chats in one batch",
    "dataset": "makes and fetches corpora",
    "report": "the final report",
    "checkpoint_manager": "saves, loads, resumes",
    "dataloader": "rows in a known order",
    "serve": "the chat server, its page, and chats in a terminal",
    "export": "writes models for transformers",
    "evals": "bits per byte, CORE, tasks, and a sandbox for programs that a model wrote",
    "train": "what the training scripts share: flags, sizes, optimizers, compiling",
    "rl": "sampled replies, their rewards, and the loss of a policy",
    "step": "one optimizer update",
    "planner": "estimates the speed and the best flags of a run before it starts",
    "meter": "the figures of a run",
    "run": "one run: folder, resume, save, measure, report",
}

WIDTH, GUTTER, GAP, PADDING = 960, 44, 7, 11  # pixels
NAME, SMALL = 15.0, 11.5  # font sizes, in pixels
LETTER = 0.602  # the width of a letter in a monospace font, as a share of the font size
LINE, CHIP = 16, 16  # the height of a line of small text, and the width and height of a chip
ROOF, LEGEND = 78, 56
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

ABOUT = "The rooms of nanochat/ by floor, from the ground up, with the floors that each room imports from."
LEGEND_LINES = (
    "The coloured numbers of a room are the floors that it imports from: always lower ones.",
    "A filled room is a folder, an outlined one a file. Sizes are rounded to hundreds of lines.",
)


@dataclass(frozen=True)
class Theme:
    """The colours of a picture.

    `fill`, `edge` and `chip` say how light and how strong the colours of the floors are.
    """

    name: str
    text: str
    soft: str
    page: str
    line: str
    fill: tuple[float, float]  # lightness, saturation
    edge: tuple[float, float]
    chip: tuple[float, float]


LIGHT = Theme(
    "light", "#1d1f21", "#5d6164", "#ffffff", "#c9c5bc", (0.94, 0.42), (0.72, 0.32), (0.40, 0.45)
)
DARK = Theme(
    "dark", "#e8e8e6", "#a4aaae", "#16181a", "#454b50", (0.16, 0.24), (0.34, 0.26), (0.66, 0.40)
)


@dataclass(frozen=True)
class Room:
    """A folder or a file of nanochat/, as the picture shows it."""

    label: str  # data/ or gpt.py
    purpose: str
    files: tuple[str, ...]  # the entries of a folder, or empty for a file
    lines: int  # rounded to hundreds
    uses: tuple[int, ...]  # the floors of the rooms that it imports


def colour(floor: int, tone: tuple[float, float]) -> str:
    """Return the colour of a floor as #rrggbb.

    The colours range from sand on the ground floor through green to blue under the roof.
    """
    hue = (38 + 190 * floor / (len(FLOORS) - 1)) / 360
    red, green, blue = (round(255 * channel) for channel in colorsys.hls_to_rgb(hue, *tone))
    return f"#{red:02x}{green:02x}{blue:02x}"


def entry_name(entry: str) -> str:
    """Return the name of an entry in the picture: `cache` for cache.py, `parts/` for a folder."""
    return entry.removesuffix(".py") if entry.endswith(".py") else f"{entry}/"


def rooms() -> dict[str, Room]:
    """Return the rooms of the house, by name, as the code has them today."""
    files = sources(PACKAGE)
    pointing = arrows(files)
    house = {}
    for name, floor in FLOOR.items():
        room_files = [
            path for path in files if path != f"{PACKAGE}/__init__.py" and room_of(path) == name
        ]
        lines = sum(files[path].count("\n") for path in room_files)
        inside = {path.split("/")[2] for path in room_files if path.count("/") > 1}
        entry_names = sorted(entry_name(entry) for entry in inside if not entry.startswith("__"))
        floors = {FLOOR[target] for room, target in pointing if room == name}
        house[name] = Room(
            label=f"{name}/" if inside else f"{name}.py",
            purpose=PURPOSES.get(name, ""),
            files=tuple(entry_names),
            lines=max(100, round(lines, -2)),
            uses=tuple(sorted(used for used in floors if used < floor)),
        )
    return house


def min_width(room: Room) -> int:
    """Return the least width of a room that has space for its label and its chips."""
    label = len(room.label) * NAME * LETTER
    bottom = len(room.uses) * (CHIP + 3) + 11 * SMALL * LETTER
    return round(max(label, bottom)) + 2 * PADDING


def widths(floor: list[Room], space: int) -> list[int]:
    """Return the width of each room of a floor.

    Each has what it needs, and a share of the remaining space that grows with its lines.
    """
    needed = [min_width(room) for room in floor]
    spare = space - sum(needed) - GAP * (len(floor) - 1)
    total = sum(room.lines for room in floor)
    shares = [spare * room.lines // total for room in floor]
    shares[-1] += spare - sum(shares)
    return [width + share for width, share in zip(needed, shares, strict=True)]


def text(x: float, y: float, words: str, size: float, fill: str, more: str = "") -> str:
    """Return one line of text as an SVG element."""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{fill}"{more}>{escape(words)}</text>'
    )


def chip(x: float, y: float, floor: int, theme: Theme) -> str:
    """Return SVG elements that show the number of a floor on a square of the floor's colour."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{CHIP}" height="{CHIP}" rx="4" fill="{colour(floor, theme.chip)}"/>'
        + text(
            x + CHIP / 2,
            y + 12,
            str(floor),
            SMALL,
            theme.page,
            ' text-anchor="middle" font-weight="700"',
        )
    )


def small_text(room: Room, width: int, theme: Theme) -> list[tuple[str, str]]:
    """Return the lines of small text in a room of this width, with their colours.

    They give the purpose of the room, then its files.
    """
    letters = int((width - 2 * PADDING) / (SMALL * LETTER))
    purpose = [(line, theme.text) for line in wrap(room.purpose, letters)]
    files = [(line, theme.soft) for line in wrap(", ".join(room.files), letters)]
    return purpose + files


def on_one_line(room: Room, width: int) -> bool:
    """Return whether a room's name, chips and size fit next to each other."""
    letters = len(room.label) * NAME + len("9,999 lines") * SMALL
    return letters * LETTER + len(room.uses) * (CHIP + 3) + 2 * PADDING + 3 * GAP <= width


def draw_room(
    room: Room, floor: int, box: tuple[int, int, int, int], compact: bool, theme: Theme
) -> list[str]:
    """Return the shapes of a room in the box (x, y, width, height).

    They show its name, its purpose, the floors that it uses, and its size. If the floor is
    `compact`, the chips and the size stand next to the name, otherwise at the bottom of the room.
    """
    x, y, width, height = box
    text_x = x + PADDING
    right = x + width - PADDING
    fill = colour(floor, theme.fill) if room.files else "none"
    edge = colour(floor, theme.edge)
    chips_top = y + height - CHIP - 8
    chips_left = text_x
    if compact:
        chips_top = y + 9
        chips_left = text_x + round(len(room.label) * NAME * LETTER) + 2 * GAP
    shapes = [
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{fill}" '
        f'stroke="{edge}"/>',
        text(text_x, y + 22, room.label, NAME, theme.text, ' font-weight="700"'),
    ]
    for index, (line, shade) in enumerate(small_text(room, width, theme)):
        shapes.append(text(text_x, y + 41 + LINE * index, line, SMALL, shade))
    for index, used in enumerate(room.uses):
        shapes.append(chip(chips_left + index * (CHIP + 3), chips_top, used, theme))
    size = f"{room.lines:,} lines"
    shapes.append(text(right, chips_top + 12, size, SMALL, theme.soft, ' text-anchor="end"'))
    return shapes


def draw_floor(number: int, floor: list[Room], top: int, theme: Theme) -> tuple[list[str], int]:
    """Return the shapes of a floor that begins at `top`, and the height of the floor."""
    placed = list(zip(floor, widths(floor, WIDTH - GUTTER - 1), strict=True))
    compact = all(on_one_line(room, width) for room, width in placed)
    lines = max(len(small_text(room, width, theme)) for room, width in placed)
    height = (36 if compact else 60) + LINE * lines
    shapes = [chip(12, top + height // 2 - CHIP // 2, number, theme)]
    x = GUTTER
    for room, width in placed:
        shapes += draw_room(room, number, (x, top, width, height), compact, theme)
        x += width + GAP
    return shapes, height


def draw_roof(theme: Theme) -> list[str]:
    """Return the shapes of the roof: the scripts, which may use every room."""
    names = sorted(path.stem for path in (ROOT / "scripts").glob("[!_]*.py"))
    middle = (GUTTER + WIDTH) / 2
    corners = f"{GUTTER},{ROOF} {GUTTER + 70},1 {WIDTH - 70},1 {WIDTH - 1},{ROOF}"
    half = (len(names) + 1) // 2
    centred = ' text-anchor="middle"'
    return [
        f'<polygon points="{corners}" fill="none" stroke="{theme.line}" stroke-linejoin="round"/>',
        text(middle, 24, "scripts/", NAME, theme.text, f'{centred} font-weight="700"'),
        text(middle, 44, ", ".join(names[:half]) + ",", SMALL, theme.soft, centred),
        text(middle, 60, ", ".join(names[half:]), SMALL, theme.soft, centred),
    ]


def draw(house: dict[str, Room], theme: Theme) -> str:
    """Return the whole picture as SVG text, which is the same for the same house."""
    body = draw_roof(theme)
    top = ROOF + GAP
    for number, names in reversed(list(enumerate(FLOORS))):
        shapes, height = draw_floor(number, [house[name] for name in names], top, theme)
        body += shapes
        top += height + GAP
    ground = f'<path d="M{GUTTER - 14} {top + 2}H{WIDTH}" stroke="{theme.line}" stroke-width="3"/>'
    body.append(ground)
    for number, line in enumerate(LEGEND_LINES):
        body.append(text(GUTTER, top + 23 + 17 * number, line, SMALL, theme.soft))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + LEGEND}" font-family="{FONT}" '
        'role="img">'
    )
    title = f"<title>The floor plan of nanochat</title><desc>{ABOUT}</desc>"
    return "\n".join([head, title, *body, "</svg>\n"])


def pictures() -> dict[Path, str]:
    """Return the content of each picture, by path."""
    house = rooms()
    return {
        FOLDER / f"architecture-{theme.name}.svg": draw(house, theme) for theme in (LIGHT, DARK)
    }


def stale() -> list[str]:
    """Return the names of the pictures that are missing or do not show the code of today."""
    return [
        path.name
        for path, drawn in pictures().items()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn
    ]


def main() -> None:
    """Write the pictures, or check them."""
    parser = argparse.ArgumentParser(description="Draw the floor plan of nanochat/ into docs/.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if a picture is out of date"
    )
    if parser.parse_args().check:
        if names := stale():
            sys.exit(f"{', '.join(names)} no longer shows the code; run: python -m dev.floorplan")
        return
    for path, drawn in pictures().items():
        write_atomic(path, drawn)


if __name__ == "__main__":
    main()
