"""The tables and chapters of the Ascend documents match the code."""

import re
from pathlib import Path

import polib
import pytest

from dev.messages import CATALOGUE
from nanochat import device
from nanochat.planner import __main__ as planner
from nanochat.planner import tables
from nanochat.planner.cards import rates_of
from nanochat.planner.plan import batch_of, plan_of
from nanochat.planner.presets import PRESETS, plan_text
from nanochat.planner.work import size_of
from nanochat.platforms.ascend import chips as ascend_chips
from nanochat.platforms.ascend import errors as ascend_errors
from nanochat.train.fit import disk
from tests.repository.test_docs import document
from tools_npu import versions

ROOT = Path(__file__).resolve().parent.parent.parent
MAIN = ("README_ASCEND.md", "README_ASCEND.en.md")
TROUBLESHOOTING = ("故障排除手册.md", "docs/en/troubleshooting.md")


def rows(text: str) -> list[list[str]]:
    """The rows of all tables in a text, each as its cells."""
    lines = (line.strip() for line in text.splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


@pytest.mark.parametrize("name", MAIN)
def test_the_table_of_chips_matches_the_code(name: str) -> None:
    told = {row[0]: row for row in rows((ROOT / name).read_text(encoding="utf-8")) if len(row) == 7}
    for chip in ascend_chips.CHIPS:
        (row,) = (row for first, row in told.items() if re.match(rf"{re.escape(chip.name)}(?![\w-])", first))
        socs = f"{chip.socs[0]}–{chip.socs[-1]}" if len(chip.socs) > 1 else str(chip.socs[0])
        assert row[1] == socs
        assert row[4] == f"{chip.tflops:g}" if chip.tflops else row[4] in ("未知", "unknown")
        assert row[2].startswith("bf16" if chip.bf16 else "fp16")
        asked = row[3] in ("读取自设备", "read from the device")
        assert asked if not chip.memory_gib else row[3] == (f"{chip.memory_gib:g} GB" if chip.trains else "LPDDR")
        estimate = "estimate" in chip.source
        assert ("估算" in row[5] or "estimate" in row[5]) == estimate


@pytest.mark.parametrize("name", MAIN)
def test_the_table_of_versions_matches_the_set_up(name: str) -> None:
    found = {row[0]: row[1:] for row in rows((ROOT / name).read_text(encoding="utf-8")) if len(row) == 3}
    for cann in {row.cann for row in versions.TABLE}:
        first, others = found[cann]
        fit = [row.torch_npu for row in versions.TABLE if row.cann == cann]
        assert versions.resolve(cann).torch_npu == first == fit[0]
        assert re.split(r"、|, ", others) == fit[1:]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert versions.NEWEST.torch_npu in text and versions.CANN_FLOOR in text


@pytest.mark.parametrize("name", MAIN)
def test_the_rows_that_fit_match_the_planner(name: str) -> None:
    found = rows((ROOT / name).read_text(encoding="utf-8"))
    chips = [chip for chip in ascend_chips.CHIPS if chip.trains and chip.tflops]
    expected = rows(tables.of_rows(chips, (4, 8, *tables.DEPTHS), tables.VOCABULARIES))[2:]
    assert len(expected) > 5
    for chip, _, *cells in expected:
        assert [chip, *cells] in found


@pytest.mark.parametrize("name", MAIN)
def test_speeds_hours_and_memory_are_the_planners(name: str) -> None:
    found = rows((ROOT / name).read_text(encoding="utf-8"))
    chips = {chip.name: chip for chip in ascend_chips.CHIPS}
    for ranks, chip in ((8, chips["910A"]), (8, chips["910B3"]), (8, chips["910B4"]), (16, chips["910C"])):
        for depth in (12, 20, 24):
            size = size_of(depth, 65_536)
            plan = plan_of(size, chip, ranks, batch_of(size, ranks), rates_of(chip))
            assert [f"{ranks} x {chip.name}", f"d{depth}", *tables.cells(plan, chip)] in found


SPEEDRUN = ("docs/speedrun.md", "docs/zh/speedrun.md")
DISK = {
    **{name: ("d12",) for name in (*MAIN, "华为昇腾运行指南.md", "docs/en/ascend-guide.md")},
    **dict.fromkeys(SPEEDRUN, ("d20", "gpt2")),
}


@pytest.mark.parametrize(("name", "presets"), DISK.items())
def test_the_disk_of_a_speedrun_is_the_planners(name: str, presets: tuple[str, ...]) -> None:
    needed = []
    for preset in map(PRESETS.__getitem__, presets):
        size = size_of(preset.depth, preset.vocab_size)
        tokens = preset.ratio * size.scaling
        needed.append(
            disk.of_speedrun(preset.depth, tokens, size.saved, preset.vocab_size, preset.corpus, preset.shards)
        )
    told = re.findall(r"(?:write[s]? up to|最多再?写入)\s(\d+)\sGB", (ROOT / name).read_text(encoding="utf-8"))
    assert told == [f"{disk_bytes / 1e9:.0f}" for disk_bytes in needed]


def test_the_plan_of_the_run_to_gpt2_is_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cards", lambda: (None, 0))
    hosts = planner.hosts_of(planner.Config(preset="gpt2"), None, None)
    plan = [line for line in plan_text("gpt2", hosts).splitlines() if line.startswith("| ")][2:]
    for name in SPEEDRUN:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "\n".join(plan) in text


@pytest.mark.parametrize("name", TROUBLESHOOTING)
def test_every_error_that_the_code_explains_has_its_chapter_and_every_code_its_row(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    patterns = [pattern for pattern, *_ in (*ascend_errors.TROUBLES, *ascend_errors.LOADING)]
    words = {word for pattern in patterns for word in pattern.split("|")} - {"No module named 'torch_npu'"}
    assert {"EI0006", "libascend_hal"} <= words
    assert [word for word in sorted(words) if not re.search(word, text)] == []

    codes = {word for word in words if re.fullmatch(r"E[A-Z]\d{4}|\\b\d{6}\\b", word)}
    codes |= {"161002", "107001", "507899", "EE9999", "EZ9999", "EH9999", "107xxx"}  # of the families
    assert len(codes) > 20
    cells = " ".join(cell for row in rows(text) for cell in row)
    assert [code for code in sorted(codes) if not re.search(code, cells)] == []


def wording(template: str, least: int) -> str:
    """The longest text of a message's first clause that has no values in it; "" if it has fewer characters."""
    clause = re.split(r"[:;(.：；（。]", re.sub(r"^(error: |错误：)", "", template))[0]
    longest = max(re.split(r"\{[^}]*\}", clause), key=len).strip()
    return longest if len(longest) >= least else ""


def test_the_handbook_quotes_a_message_as_a_chinese_terminal_shows_it() -> None:
    text = (ROOT / TROUBLESHOOTING[0]).read_text(encoding="utf-8")
    quoted = "\n".join(span for span in document(TROUBLESHOOTING[0]).inline if " " in span)
    chinese_of: dict[str, list[str]] = {}  # by the English words; several messages may share them
    for entry in polib.pofile(str(CATALOGUE)):
        words = wording(entry.msgid, 13)
        if words and words in quoted and not entry.msgctxt:
            chinese_of.setdefault(words, []).append(wording(entry.msgstr, 4))
    assert len(chinese_of) > 10
    assert [english for english, chinese in chinese_of.items() if not any(words in text for words in chinese)] == []
