"""The commands that follow a finished stage, which the stage prints at its end."""

import os
import shlex

from nanochat.common import log, tr

CHAT = "python -m scripts.chat_cli --source {stage} --model_tag {tag}"
WEB = "python -m scripts.chat_web --source {stage} --model_tag {tag}"
EXPORT = "python -m nanochat.export exported-{tag} --source {stage} --model_tag {tag}"
# Stage -> what may follow it; the first command is the next stage of the pipeline.
NEXT = {
    "base": ("python -m scripts.mid_train --model_tag {tag}",),
    "mid": ("python -m scripts.chat_sft --model_tag {tag}", CHAT),
    "sft": ("python -m scripts.chat_rl --model_tag {tag}", CHAT, WEB, EXPORT),
    "rl": (CHAT, WEB, EXPORT),
    "tune": (CHAT, WEB, EXPORT),
}


def after(stage: str, tag: str) -> list[str]:
    """Return the commands that may follow the run with this tag in `stage`."""
    return [command.format(stage=stage, tag=shlex.quote(tag)) for command in NEXT[stage]]


def show(stage: str, tag: str) -> None:
    """Log the commands that may follow a finished stage.

    Under speedrun.sh, which starts the next stage itself, nothing is logged.
    """
    if os.environ.get("NANOCHAT_REASON_FILE"):
        return
    log(tr("next:"))
    for command in after(stage, tag):
        log(f"  {command}")
