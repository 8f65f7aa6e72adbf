"""Opening a published model for fine-tuning."""

from pathlib import Path

import pytest

from nanochat.checkpoint_manager.huggingface.base import open_base
from tests.support.qwens import write_folder
from tests.support.tiny_model import on_cpu


@pytest.mark.parametrize(("end", "warns"), [("<|im_end|>", False), ("\n", True), ("###", True)])
def test_a_template_whose_replies_never_end_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str, warns: bool
) -> None:
    write_folder(tmp_path, "qwen3")
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    base = open_base(tmp_path, 16, None, on_cpu(), 1)
    base.warn_if_replies_never_end()
    assert ("does not learn where to stop" in capsys.readouterr().err) == warns
