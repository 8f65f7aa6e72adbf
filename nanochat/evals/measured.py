"""Chooses the model that an evaluation measures: one that was trained here, or a published one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from nanochat.checkpoint_manager.load import Loaded, load_named
from nanochat.common import UserError, tr
from nanochat.data.mixing import Data, resolve_data
from nanochat.device import Compute

Stage = Literal["base", "mid", "sft", "rl", "tune"]


@dataclass(frozen=True)
class MeasuredFlags:
    """The flags that name the model to measure."""

    source: Annotated[Stage | None, arg(aliases=["-i"])] = None
    """Stage of the model. Default: the latest one, in the order rl > sft > mid > base > tune."""
    model_tag: Annotated[str | None, arg(aliases=["-g"])] = None
    """Tag of the model, such as d20. Default: the newest."""
    step: Annotated[int | None, arg(aliases=["-s", "--model_step"])] = None
    """Step of the checkpoint. Default: the last. Give an earlier step to compare it."""
    model: Path | None = None
    """Folder of a published model to measure instead:
    config.json, tokenizer.json and safetensors files."""
    adapter: Path | None = None
    """Folder of an adapter (LoRA) for the model of --model, as scripts.finetune or peft wrote it."""

    def load(self, compute: Compute, default_stage: Stage | None = None) -> Loaded:
        """Load the model that the flags name, merged with its adapter.

        Without --model and --source, it is a model of `default_stage` or, if that is None, of the
        latest stage. Raises UserError as load_named() does.
        """
        stage = self.source
        if stage is None and self.model is None:
            stage = default_stage
        return load_named(self.model, self.adapter, stage, self.model_tag, self.step, compute)


def texts_for(data: str | None, loaded: Loaded) -> Data:
    """Return the corpus that `data` names or, if it is None, the one that the model learned from.

    Raises UserError if that corpus is not here. For a model of a published folder, `data` must be
    given (exit code 2).
    """
    if data is None and loaded.from_folder:
        raise UserError(
            tr(
                "--data must name the texts to measure a published model on, since what it "
                "was trained on is not here: name a corpus, or a folder of texts"
            ),
            exit_code=2,
        )
    return resolve_data(data or loaded.meta["config"]["corpus"])
