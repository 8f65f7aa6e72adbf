"""Turns a report into one HTML file that opens without a network."""

import base64
import html
import re
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import OptionsDict

from nanochat.common import language

# The only HTML that our own Markdown contains. Anything else that looks like HTML comes from a
# model's reply and is shown as text.
OWN_HTML = re.compile(r"(<details><summary>[\w ]+</summary>|</details>)\s*")
# With this policy, a browser loads and runs nothing for the page, whatever a sample in it says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.6 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; margin: 1rem 0; }
th, td { border: 1px solid var(--line); padding: .25rem .6rem; text-align: left; vertical-align: top; }
img { max-width: 100%; background: #fff; border-radius: .4rem; }
code { background: var(--line); border-radius: .2rem; padding: 0 .2rem; overflow-wrap: anywhere; }
blockquote { border-left: .25rem solid #d80; margin-left: 0; padding-left: 1rem; }
"""


def page(title: str, markdown: str, pictures: Mapping[str, bytes]) -> str:
    """Return the Markdown text `markdown` as one HTML document.

    `pictures` maps file names in `markdown` to PNGs, which are embedded. HTML in `markdown` is
    shown as text, except for the report's own <details>.
    """
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    renderer.add_render_rule("html_block", _escape_foreign_html)
    renderer.add_render_rule("html_inline", _escape_foreign_html)
    tokens = renderer.parse(markdown)
    for token in tokens:
        for child in token.children or ():
            if child.tag == "img":
                _embed(child, pictures)
    body = renderer.renderer.render(tokens, renderer.options, {})
    return (
        f'<!doctype html>\n<html lang="{language()}">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n{body}</html>\n"
    )


def _embed(image: Token, pictures: Mapping[str, bytes]) -> None:
    """Replace the file name in an image token with its picture, if known, as a data URL."""
    picture = pictures.get(str(image.attrs["src"]))
    if picture is not None:
        image.attrs["src"] = f"data:image/png;base64,{base64.b64encode(picture).decode()}"


def _escape_foreign_html(
    self: RendererHTML,
    tokens: Sequence[Token],
    idx: int,
    options: OptionsDict,
    env: MutableMapping[str, Any],
) -> str:
    """Return the report's own HTML unchanged, and other HTML escaped. markdown-it calls this."""
    content = tokens[idx].content
    return content if OWN_HTML.fullmatch(content) else html.escape(content)
