"""Chinese documents and messages use one word for each term: those of docs/zh/terms.md, and none of its last column."""

import re
from collections.abc import Iterator
from functools import cache

import polib
import pytest

from dev.messages import CATALOGUE
from tests.repository.test_docs import ROOT, documents

PAGES = ("docs/zh/terms.md", "docs/terms.md")


def terms(page: str) -> Iterator[tuple[str, str, list[str]]]:
    """Each term of a page: in English, in Chinese, and what must not stand for it."""
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and re.search(r"[一-鿿]", cells[1]) and cells[0] != "英文":
            yield cells[0], cells[1], re.findall("`([^`]+)`", cells[3])


@cache
def unwanted_words() -> list[tuple[str, str]]:
    return [(word, term) for _, term, words in terms(PAGES[0]) for word in words]


def unwanted(text: str) -> list[str]:
    return [f"{word} for {term}" for word, term in unwanted_words() if word in text]


def chinese_documents() -> list[str]:
    by_name = [name for name in documents() if name.startswith("docs/zh/") or name.endswith(".zh.md")]
    manuals = [name for name in documents() if re.search(r"^[^/]*[一-鿿]", name)]
    return sorted({*by_name, *manuals, "README_ASCEND.md"} - {PAGES[0]})


def test_the_documents_use_the_terms() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in chinese_documents()}
    assert {name: wrong for name, text in texts.items() if (wrong := unwanted(text))} == {}


def test_the_messages_use_the_terms() -> None:
    entries = polib.pofile(str(CATALOGUE))
    assert {entry.msgid: wrong for entry in entries if (wrong := unwanted(entry.msgstr))} == {}


@pytest.mark.parametrize("folder", ["tools_npu", "nanochat/serve", "nanochat/platforms", "nanochat/report", "runs"])
def test_texts_in_the_code_use_the_terms(folder: str) -> None:
    files = [file for file in (ROOT / folder).rglob("*") if file.suffix in {".py", ".js", ".sh"}]
    assert {file.name: wrong for file in files if (wrong := unwanted(file.read_text(encoding="utf-8")))} == {}


def test_both_pages_list_the_same_terms_and_a_wrong_word_is_found() -> None:
    assert list(terms(PAGES[0])) == list(terms(PAGES[1]))
    assert len({english for english, _, _ in terms(PAGES[0])}) >= 40
    assert unwanted("把语料库放进文件夹") == ["语料库 for 语料", "文件夹 for 目录"]
