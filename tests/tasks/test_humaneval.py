"""HumanEval: replies in all their shapes, graded by running them."""

from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.evals import sandbox as execution
from tasks.humaneval import HumanEval, build_program, extract_code

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks" / "openai_humaneval"


@pytest.fixture
def humaneval() -> HumanEval:
    return HumanEval(DATA, unsafe_exec=True)  # so that the test also runs where programs cannot be isolated


def test_canonical_solutions_pass(humaneval: HumanEval) -> None:
    assert [humaneval.grade(i, humaneval[i].messages[1].text) for i in range(len(humaneval))] == [1.0] * 3


def test_code_is_found_in_all_the_ways_models_give_it(humaneval: HumanEval) -> None:
    i = next(i for i in range(3) if "def total" in humaneval[i].messages[0].text)
    whole = "def total(numbers: List[int]) -> int:\n    return sum(numbers)"
    replies = [
        whole,
        "    return sum(numbers)",
        f"Sure!\n```python\n{whole}\n```\nThis adds them.",
        f"```\n{whole}",  # cut off
        "1. It adds them:\n   ```python\n   def total(numbers):\n       return sum(numbers)\n   ```",
        f"First\n```sh\nls\n```\nthen\n```py\n{whole}\n```",
        "```python\n    return sum(numbers)\n```",
    ]
    assert [humaneval.grade(i, reply) for reply in replies] == [1.0] * len(replies)
    for wrong in ("", "    return 0", "I cannot.", f"{whole}\nraise SystemExit", "import os; os._exit(0)"):
        assert humaneval.grade(i, wrong) == 0.0


def test_helpers_of_the_prompt_stay_defined(humaneval: HumanEval) -> None:
    i = next(i for i in range(3) if "def unshift" in humaneval[i].messages[0].text)
    assert humaneval.grade(i, "```python\ndef unshift(text):\n    return text.translate({97:122})\n```") == 0.0
    right = "def unshift(text):\n    return ''.join('zabcdefghijklmnopqrstuvwxy'[ord(c) - 97] for c in text)"
    assert humaneval.grade(i, right) == 1.0


def test_imports_stay_where_the_head_alone_is_no_function() -> None:
    program = build_program("import math\n\ndef f(x):\n    # rounds up\n", "def f(x):\n    return 1", "TEST", "f")
    assert program == "import math\ndef f(x):\n    return 1\n\nTEST\n\ncheck(f)\n"


def test_the_first_block_is_taken_when_none_defines_the_function() -> None:
    assert extract_code("```python\na\n```\n```python\nb\n```", "f") == "a\n"


def test_humaneval_is_refused_at_once_where_code_cannot_be_isolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "_no_namespaces", lambda: "not permitted")
    execution.tier.cache_clear()
    with pytest.raises(UserError, match="--unsafe-exec"):
        HumanEval(DATA)
    execution.tier.cache_clear()
