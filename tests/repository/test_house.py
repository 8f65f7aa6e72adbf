"""The house is measured right, and its floor plan shows the code as it is."""

from dev import floorplan, house


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


def test_the_floor_plan_shows_the_code() -> None:
    assert floorplan.stale() == [], "run: python -m dev.floorplan"
