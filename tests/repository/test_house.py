"""The house is measured rightly, and its floor plan shows the code as it is."""

import sys
import xml.etree.ElementTree as ET

import pytest

from dev import floorplan, house

# --- what dev/house.py measures ------------------------------------------------------------------


def test_an_arrow_is_an_import_between_two_rooms() -> None:
    files = {
        "nanochat/__init__.py": "from nanochat import gpt",  # the package itself is no room
        "nanochat/gpt.py": "from nanochat.data import bpe\nfrom nanochat.data.chat import Chat\nimport torch",
        "nanochat/data/bpe.py": "from .chat import Chat\nfrom ..common import log",
        "nanochat/engine.py": "def load() -> None:\n    import nanochat.gpt",
    }
    assert house.arrows(files) == {("gpt", "data"): 2, ("data", "common"): 1, ("engine", "gpt"): 1}


def test_a_circle_is_found_with_the_files_that_make_it() -> None:
    files = {
        "nanochat/a.py": "from nanochat import b",
        "nanochat/b.py": "def later() -> None:\n    from nanochat.c import thing",
        "nanochat/c.py": "import nanochat.a",
        "nanochat/d.py": "from nanochat import a",
    }
    assert [set(circle) for circle in house.circles(files)] == [{"nanochat/a.py", "nanochat/b.py", "nanochat/c.py"}]
    assert house.circles({**files, "nanochat/c.py": "import os"}) == []


# --- the floor plan ------------------------------------------------------------------------------


def test_the_floor_plan_shows_the_code() -> None:
    assert floorplan.stale() == [], "run: python -m dev.floorplan"


def test_every_room_has_its_purpose_and_no_other_has() -> None:
    assert set(floorplan.PURPOSES) == set(house.FLOOR)


@pytest.mark.parametrize("theme", [floorplan.LIGHT, floorplan.DARK])
def test_the_floor_plan_names_every_room_and_the_floors_below_it(theme: floorplan.Theme) -> None:
    rooms = floorplan.rooms()
    root = ET.fromstring(floorplan.draw(rooms, theme))
    said = ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {room.label for room in rooms.values()} <= set(said)
    chips = sum(len(room.uses) for room in rooms.values()) + len(house.FLOORS)
    assert sum(text.isdigit() for text in said) == chips
    assert rooms["data"].label == "data/" and "bpe" in rooms["data"].files and rooms["gpt"].files == ()
    assert rooms["engine"].uses[0] == house.FLOOR["common"]


def test_no_text_of_the_floor_plan_leaves_its_room() -> None:
    rooms = floorplan.rooms()
    for names in house.FLOORS:
        floor = [rooms[name] for name in names]
        for room, width in zip(floor, floorplan.widths(floor, floorplan.WIDTH), strict=True):
            space = width - 2 * floorplan.PADDING
            assert len(room.label) * floorplan.NAME * floorplan.LETTER <= space
            lines = floorplan.small_text(room, width, floorplan.LIGHT)
            assert all(len(line) * floorplan.SMALL * floorplan.LETTER <= space for line, _ in lines)


def test_a_stale_floor_plan_is_refused_by_name_and_repaired(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(floorplan, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["floorplan", "--check"])
    with pytest.raises(SystemExit, match=r"architecture-light\.svg, architecture-dark\.svg .*python -m dev\.floorplan"):
        floorplan.main()
    monkeypatch.setattr(sys, "argv", ["floorplan"])
    floorplan.main()
    assert floorplan.stale() == []
    (tmp_path / "architecture-dark.svg").write_text("<svg/>", encoding="utf-8")
    assert floorplan.stale() == ["architecture-dark.svg"]
