"""The one list of printed lines that stay English when Chinese is chosen, each with the reason."""

import re

# A regular expression of the whole line, and why such a line is not translated. The list is frozen: a new message goes
# through tr() instead.
EXEMPT = {
    r"\s*[-─╭╰│]*": "a line without words",
    r"step \d+/\d+ .*": "figures of a training step, which scripts parse",
    r"step \d+( \| [a-z_]+: -?[\d.]+)+( \([\d.]+ s\))?": "figures under their names in metrics.jsonl",
    r"\s*(python|torchrun|bash|cd|export) .*": "a command to type",
    r"\{.*\}": "JSON",
    r"\s*--[a-z_-]+(=\S+)?( --[a-z_-]+(=\S+)?)*": "names of flags",
    r"\s*/\S+": "the name of a file",
    r"\[(rank\d+|W\d+|E\d+|Gloo)\S*\].*": "a line of torch itself",
}  # fmt: skip

CHINESE = re.compile(r"[\u4e00-\u9fff]")


def english_lines(printed: str) -> list[str]:
    """The lines of a text that have no Chinese and are not exempt."""
    lines = [line.rstrip() for part in printed.splitlines() for line in part.split("\r")]
    exempt = re.compile("|".join(f"(?:{pattern})" for pattern in EXEMPT))
    return [line for line in lines if not CHINESE.search(line) and not exempt.fullmatch(line)]
