"""The HTML report needs nothing but itself, and obeys none of what a model said."""

from nanochat.report.html import page


def test_pictures_are_inside_the_file() -> None:
    text = page("a & b", "# t\n\n![curves](x.png)\n\n![other](y.png)\n", {"x.png": b"\x89PNG"})
    assert 'src="data:image/png;base64,iVBORw=="' in text and 'src="y.png"' in text
    assert "<title>a &amp; b</title>" in text and "http://" not in text and "https://" not in text


def test_what_a_model_said_is_shown_and_not_obeyed() -> None:
    said = "<script>alert(1)</script> <details><summary>settings</summary> <img src=x onerror=alert(1)>"
    text = page(
        "t", f"{said}\n\n| a |\n| --- |\n| {said} |\n\n<script>\nalert(1)\n</script>\n\n[x](javascript:alert(1))\n", {}
    )
    assert "<script" not in text and "<img" not in text and 'href="javascript' not in text
    assert text.count("&lt;script&gt;") == 3
    assert "default-src 'none'" in text


def test_our_own_folds_stay() -> None:
    text = page("t", "<details><summary>settings</summary>\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n\n</details>\n", {})
    assert "<details><summary>settings</summary>" in text and "<td>1</td>" in text and text.count("</details>") == 1
