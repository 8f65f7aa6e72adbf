"""Markdown in answers: a table of texts and their elements, hostile and half-streamed texts, and the page with them."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.serve.pages import ask
from tests.support.browsing import answers, chromium, finished, send, visit
from tests.support.fake_engine import FakeEngine, running

pytestmark = pytest.mark.browser

OUTLINE = """
const { readMarkdown } = await import("./assets/reply/markdown.js");
const { draw } = await import("./assets/reply/draw.js");
const outline = (node) => {
    if (node.nodeType === Node.TEXT_NODE) return node.data;
    if (node.nodeName === "WBR") return "";
    const inner = [...node.childNodes].map(outline).join("");
    if (node.className === "head") return node.firstChild.textContent && `[${node.firstChild.textContent}]`;
    if (["DIV", "TBODY", "THEAD"].includes(node.nodeName)) return inner;
    const name = node.nodeName.toLowerCase() + (node.start > 1 ? node.start : "") + (node.href ? ` ${node.href}` : "");
    const start = `<${name}${node.className ? ` ${node.className}` : ""}>${inner}`;
    return ["br", "hr"].includes(name) ? start : `${start}</>`;
};
const seen = (text, open) => draw(readMarkdown(text, open), []).map(outline).join("");
"""

# Texts as models write them, and the elements that CommonMark and GitHub's tables give them. A line break in a
# paragraph stays one, as small models mean it.
DRAWN = {
    "one\n\ntwo\nlines": "<p>one</><p>two<br>lines</>",
    "# One\n### Three ###\ntext": "<h1>One</><h3>Three</><p>text</>",
    "#hash and C# 1": "<p>#hash and C# 1</>",
    "**b** *i* ***bi*** ~~d~~ `c`": "<p><strong>b</> <em>i</> <strong><em>bi</></> <del>d</> <code>c</></>",
    "__b__ _i_ snake_case_name": "<p><strong>b</> <em>i</> snake_case_name</>",
    "$x_{1} + y_{2}$ _(a)_b": "<p>$x_{1} + y_{2}$ _(a)_b</>",
    "企鹅**很会**游泳": "<p>企鹅<strong>很会</>游泳</>",
    "37 * 48 = 2*3*4 and (2)*(3)*(4)": "<p>37 * 48 = 2*3*4 and (2)*(3)*(4)</>",
    "**a *b** c": "<p>**a <em>b</>* c</>",
    "a ** b ** c, 2 ** 3": "<p>a ** b ** c, 2 ** 3</>",
    r"\*no\* `a\*b` ``a`b`` `open": r"<p>*no* <code>a\*b</> <code>a`b</> `open</>",
    "- a\n- b\n  - c\n    1. d\n- e": "<ul><li>a</><li>b<ul><li>c<ol><li>d</></></></></><li>e</></>",
    "1. a\n2. b\n\n   more\n3. c": "<ol><li>a</><li>b<p>more</></><li>c</></>",
    "3) three": "<ol3><li>three</></>",
    "text\n- a\n- b\n\nend": "<p>text</><ul><li>a</><li>b</></><p>end</>",
    "- a\n\n- b": "<ul><li>a</><li>b</></>",
    "1776.": "<p>1776.</>",
    "- a\n1. b": "<ul><li>a</></><ol><li>b</></>",
    "- ```\n  code\n  ```": "<ul><li><pre><code>code</></></></>",
    "> a\n> > b\n\nc": "<blockquote><p>a</><blockquote><p>b</></></><p>c</>",
    "```python\nif x:\n\n    **y**\n```\nend": "[python]<pre><code>if x:\n\n    **y**</></><p>end</>",
    "```make\nall:\n\tcc a.c\n\t\t# b\tc\n```": "[make]<pre><code>all:\n\tcc a.c\n\t\t# b\tc</></>",
    "-\ta\n\t- b\n\t\tc": "<ul><li>a<ul><li>b<br>c</></></></>",
    "````\n```\n````": "<pre><code>```</></>",
    "```ls -la```\nlists": "<p><code>ls -la</><br>lists</>",
    "~~~\nnever closed": "<pre><code>never closed</></>",
    "a\n\n---\n\n***": "<p>a</><hr><hr>",
    "| a | b |\n| --- | ---: |\n| 1 | `x` |\n| 2 |\nend": (
        "<table><tr><th>a</><th right>b</></><tr><td>1</><td right><code>x</></></><tr><td>2</><td right></></></>"
        "<p>end</>"
    ),
    "a | b\nno table": "<p>a | b<br>no table</>",
    "[name](https://a.example/x_(y)) end": (
        "<p><a https://a.example/x_(y)>name</><span address> (a.example)</> end</>"
    ),
    "see https://a.example/b_c_d. And": "<p>see <a https://a.example/b_c_d>https://a.example/b_c_d</>. And</>",
    "见https://a.example/页。好": "<p>见<a https://a.example/%E9%A1%B5>https://a.example/页</>。好</>",
    "见https://a.example:80查看/页（或http://b.example/x（首页）)": (
        "<p>见<a https://a.example:80/>https://a.example:80</>查看/页（或<a http://b.example/x>http://b.example/x</>（首页）)</>"
    ),
    "https://www.中国.cn": (
        "<p><a https://www.xn--fiqs8s.cn/>https://www.中国.cn</><span address> (www.xn--fiqs8s.cn)</></>"
    ),
    "![a *cat*](http://a.example/c.png)": (
        "<p><a http://a.example/c.png>a <em>cat</></><span address> (a.example)</></>"
    ),
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](/here)": (
        "<p>[x](javascript:alert(1)) [y](data:text/html,z) [z](/here)</>"
    ),
    "[https://good.example](https://evil.example)": (
        "<p><a https://evil.example/>https://good.example</><span address> (evil.example)</></>"
    ),
    "[evil.example@good.example](https://evil.example)": (
        "<p><a https://evil.example/>evil.example@good.example</><span address> (evil.example)</></>"
    ),
    "<b>x</b> &lt; <script>y</script>": "<p><b>x</b> &lt; <script>y</script></>",
}
# Half-streamed texts: what has begun counts as if it ended here, and marks that may become anything are not shown.
HALVES = {
    "a **bo": "<p>a <strong>bo</></>",
    "a **bo*": "<p>a <strong>bo</></>",
    "a **": "<p>a </>",
    "a `co": "<p>a <code>co</></>",
    "text\n-": "<p>text</>",
    "text\n``": "<p>text</>",
    "##": "",
    "```py\nx =": "[py]<pre><code>x =</></>",
    "| a | b": "<table><tr><th>a</><th>b</></></>",
    "| a | b |\n| -": "<table><tr><th>a</><th>b</></></>",
    "see [page](https://a.exa": "<p>see page</>",
    "- one\n- **tw": "<ul><li>one</><li><strong>tw</></></>",
}


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with chromium() as browser, running(FakeEngine()) as url, visit(browser, url) as page:
        yield page


@pytest.fixture(scope="module")
def browser(page: Page) -> Browser:
    assert page.context.browser
    return page.context.browser


def drawn(page: Page, texts: list[str], open: bool = False) -> list[str]:
    return page.evaluate(
        f"async ([texts, open]) => {{ {OUTLINE} return texts.map((t) => seen(t, open)) }}", [texts, open]
    )


def test_markdown_is_drawn_as_elements(page):
    assert dict(zip(DRAWN, drawn(page, [*DRAWN]), strict=True)) == DRAWN


def test_half_streamed_markdown_looks_like_what_it_becomes(page):
    assert dict(zip(HALVES, drawn(page, [*HALVES], True), strict=True)) == HALVES


HOSTILE = """async ([pieces, rounds]) => {
    const { readMarkdown } = await import("./assets/reply/markdown.js");
    const { draw, redraw } = await import("./assets/reply/draw.js");
    let state = 42;
    const random = (most) => (state = (state * 1103515245 + 12345) % 2 ** 31) % most;
    const tags = new Set(("P H1 H2 H3 H4 H5 H6 UL OL LI BLOCKQUOTE PRE CODE TABLE THEAD TBODY TR TH TD HR BR WBR " +
        "STRONG EM DEL A SPAN DIV BUTTON svg use").split(" "));
    const attributes = { A: ["href", "title", "target", "rel"], OL: ["start"], svg: ["aria-hidden"], use: ["href"],
        BUTTON: ["type"], SPAN: ["data-i18n"] };
    attributes.PRE = attributes.DIV = ["tabindex", "role", "aria-label", "data-i18n-label"];
    const wrong = [];
    const letters = (text) => text.replace(/[^\\p{L}\\p{N}]/gu, "");
    for (let round = 0; round < rounds; round++) {
        const text = Array.from({ length: 1 + random(30) }, () => pieces[random(pieces.length)]).join("");
        const box = document.createElement("div");
        const cuts = [random(text.length + 1), random(text.length + 1)].sort((a, b) => a - b);
        for (const cut of cuts) redraw(box, readMarkdown(text.slice(0, cut), true), []);
        redraw(box, readMarkdown(text), []);
        const fresh = document.createElement("div");
        fresh.append(...draw(readMarkdown(text), []));
        if (box.innerHTML !== fresh.innerHTML) wrong.push(["differs from a fresh drawing", text, cuts]);
        for (const element of box.querySelectorAll("*")) {
            if (!tags.has(element.nodeName)) wrong.push([element.nodeName, text]);
            for (const { name } of element.attributes) {
                if (name !== "class" && !attributes[element.nodeName]?.includes(name)) wrong.push([name, text]);
            }
            const { href } = element;
            if (typeof href === "string" && href && !/^https?:/.test(href)) wrong.push([href, text]);
        }
        const words = letters(box.textContent);
        if (!/http|\\d|```|~~~/.test(text) && words !== letters(text)) wrong.push(["lost words", text, words]);
    }
    return wrong.slice(0, 3);
}"""
PIECES = [
    "*", "**", "***", "_", "__", "~~", "`", "```", "````", "~~~", "#", "## ", "> ", ">", "- ", "* ", "+ ", "1. ", "9) ",
    "\n", "\n\n", "\n", " ", "  ", "    ", "\t", "|", "| a |", "|---|", "\n|-|-|\n", "---", "[", "]", "(", ")",
    "](", "![", "<b>", "</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))",
    "[y](https://a.example)", "https://b.example/", "JaVaScRiPt:x", "data:text/html,x", "\\", "\\*", "&lt;", "\x00",
    "\u202e", "\ud800", "企鹅", "世界", "word", "a", "B", "é", "[z](http://[bad)", "\r\n", "\r", ":-:",
    "[w](vbscript:x)",
]  # fmt: skip


def test_hostile_markdown_gives_only_known_elements_and_loses_no_words(page):
    assert page.evaluate(HOSTILE, [PIECES, 4000]) == []


@pytest.mark.parametrize(
    "text",
    ["*a " * 60_000, "**" * 90_000, "[" * 180_000, "[a](" * 45_000, "`" * 180_000, "` `` " * 40_000, "> " * 90_000,
     "- " * 90_000, "|" * 180_000, "a|b\n" * 45_000, "\n" * 180_000, "_a" * 90_000, "http://" * 25_000,
     "  - a\n" * 30_000,
     " " * 180_000 + "x", "![" * 90_000, "\\" * 180_000, "#" * 180_000, "1. " * 60_000],
)  # fmt: skip
def test_a_long_pathological_text_is_drawn(page, text):
    """A parser whose time grows with the square of the length would not end before the test's own time is over."""
    count = """async (text) => {
        const { readMarkdown } = await import("./assets/reply/markdown.js");
        const { draw } = await import("./assets/reply/draw.js");
        for (const open of [true, false]) readMarkdown(text, open);
        return draw(readMarkdown(text.slice(0, 20_000)), []).length;
    }"""
    page.set_default_timeout(30_000)
    assert page.evaluate(count, text) >= 0


def test_a_long_answer_is_not_drawn_from_its_beginning_for_each_token(page):
    letters = """async (paragraphs) => {
        const { ModelTurn } = await import("./assets/reply/turn.js");
        const turn = new ModelTurn();
        const segment = Intl.Segmenter.prototype.segment; // finds the words of Chinese texts that are drawn
        let letters = 0;
        Intl.Segmenter.prototype.segment = function (text) {
            letters += text.length;
            return segment.call(this, text);
        };
        for (let number = 0; number < paragraphs; number++) turn.addText("企鹅不会飞。\\n\\n");
        Intl.Segmenter.prototype.segment = segment;
        turn.end(null);
        return [letters, turn.body.querySelectorAll("p").length];
    }"""
    drawn_letters, paragraphs = page.evaluate(letters, 300)
    assert paragraphs == 300 and 6 * 300 <= drawn_letters < 6 * 300 * 5


def test_a_streamed_answer_keeps_what_the_reader_holds(browser):
    code = "Look:\n\n```python\nprint(1)\n```\n\nand **more** words"
    engine = FakeEngine({"code": [code]}, gated=True)
    options: dict[str, Any] = {"permissions": ["clipboard-read", "clipboard-write"]}
    with running(engine) as url, visit(browser, url, **options) as page:
        send(page, "code")
        engine.allow(code.index("print") + 5)
        expect(page.locator(".code code")).to_have_text("print")
        page.get_by_role("button", name="Copy code").focus()
        page.evaluate("() => { window.first = document.querySelector('.body p') }")
        engine.allow(len(code) - code.index("print"))
        finished(page)
        expect(page.locator(".body strong")).to_have_text("more")
        expect(page.get_by_role("button", name="Copy code")).to_be_focused()
        assert page.evaluate("() => window.first.isConnected")
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("() => navigator.clipboard.readText()") == "print(1)"
        page.reload()
        expect(answers(page).locator("strong")).to_have_text("more")


def test_a_link_opens_elsewhere_and_tells_nothing_of_this_page(page):
    ask(page, "[a page](https://a.example/x)")  # the fake engine echoes it
    link = page.get_by_role("link", name="a page")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    expect(link).to_have_attribute("target", "_blank")
    expect(link).to_have_attribute("title", "https://a.example/x")
    expect(answers(page)).to_have_text("a page (a.example)")
