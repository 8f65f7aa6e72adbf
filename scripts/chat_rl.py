"""Reinforcement learning on problems with checkable answers: sample replies, grade them, make the better ones likelier.

python -m scripts.chat_rl
torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from nanochat.common import UserError, log
from nanochat.dataloader import epoch_numbers
from nanochat.device import Compute
from nanochat.evals.chat import evaluate
from nanochat.generate.sampling import Sampling
from nanochat.train import sizes
from nanochat.train.flags import EpochFlags, Free, named_after
from nanochat.train.rl import rollout
from nanochat.train.rl.groups import Groups
from nanochat.train.rl.policy import PolicyFlags
from nanochat.train.rl.sampler import Sampler
from nanochat.train.rl.trees import OverTrees, over_trees
from nanochat.train.samples import Graded
from nanochat.train.stage import Stage, Work, launch
from nanochat.train.update import NO_UPDATE
from tasks.mixtures import rl_tasks


@dataclass(frozen=True)
class Config(PolicyFlags, EpochFlags):
    """Flags of reinforcement learning."""

    problems: str | None = None
    """JSONL file of your own problems, such as {"question": "...", "answer": "42"}, used instead of the corpus's.
    Every tenth one is held out to measure accuracy"""
    source: Free[Literal["sft", "mid"]] = "sft"
    """stage whose model to start from"""
    source_step: Free[int | None] = None
    """step of that stage's checkpoint; default: the newest"""
    examples_per_step: int = 16
    """problems per step over all devices"""
    num_samples: int = 16
    """replies sampled for each problem, at least 2, since each is judged against the others"""
    device_batch_size: Free[int] = 8
    """replies per training pass on one device, at most.
    Lower it when memory runs out: what is learned stays the same"""
    max_new_tokens: int = 256
    """longest reply, in tokens"""
    temperature: float = 1.0
    """sampling temperature, above 0: the higher, the more the replies to a problem differ"""
    top_k: int = 50
    """sample from this many of the likeliest tokens; 0: from all tokens"""
    init_lr_frac: float = 0.05
    """factor on all learning rates, which then fall linearly to 0"""
    eval_every: Free[int] = 60
    """steps between measurements on held-out problems; 0: measure only before the first step and at the end"""
    eval_examples: Free[int] = 400
    """problems per measurement"""
    trees: Free[bool | None] = None
    """sample and train what replies to a problem have in common once; the result is the same up to rounding.
    default: on CPUs, for models and losses that allow it"""
    shuffle_rewards: bool = False
    """shuffle each step's rewards among its replies: a control run that must not learn"""
    compile: Free[bool | None] = None
    """RL compiles nothing: only --no_compile is accepted, for command lines that other stages share"""
    graphs: Free[bool] = False
    """RL captures no graphs: only --no-graphs is accepted"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_k == 1:  # as at temperature 0
            raise UserError(
                "--top_k must be 0 or at least 2, since with 1 all replies to a problem are alike, got 1: "
                "change it, or leave it out",
                exit_code=2,
            )
        for asked, name in ((self.compile, "--compile"), (self.graphs, "--graphs")):
            if asked:
                raise UserError(
                    f"RL neither compiles nor captures its passes, whose shapes follow the replies, got {name}: "
                    "leave it out",
                    exit_code=2,
                )

    def saved_as(self, tag: str) -> str:
        """As in EpochFlags; a model that learns your own problems is kept beside the one that learned the corpus's."""
        return named_after(tag, self.problems) if self.out_tag is None else self.out_tag


def train(cfg: Config, compute: Compute) -> None:
    """Train over the problems, resuming from the newest checkpoint if there is one."""
    stage = Stage.after(cfg.source, cfg.source_step, "rl", cfg, compute)
    sizes.check_for_ranks("examples_per_step", cfg.examples_per_step, compute)
    cfg.check(cfg.max_new_tokens)
    model, tokenizer = stage.load_parent()
    task, held_out = rl_tasks(stage.corpus, cfg.problems)
    sampled = cfg.examples_per_step * cfg.oversample  # problems of a step
    fitting = np.array(rollout.fitting(task, tokenizer, model.config.sequence_len))
    steps = cfg.steps(len(fitting), sampled)
    log(
        f"task: {task.name}, {len(fitting):,} problems; {steps:,} steps of {sampled} x {cfg.num_samples} replies"
    )

    sampler, reference = Sampler(model, compute), None
    if cfg.kl:
        reference = Sampler(model, compute)
        reference.renew(model)  # the weights that SFT left, whatever resume() loads
    sampling = Sampling(cfg.temperature, cfg.top_k or None, cfg.max_new_tokens, cfg.seed)
    greedy = Sampling(temperature=0.0, max_tokens=cfg.max_new_tokens)

    def measure(line: dict[str, Any]) -> None:
        said = Graded(held_out, cfg.samples, compute)
        score = evaluate(
            held_out,
            sampler.model,
            tokenizer,
            compute,
            greedy,
            limit=cfg.eval_examples,
            on_reply=said.hear,
        )
        line["accuracy"] = score.accuracy
        said.keep(stage.folder, line["step"])
        log(f"step {line['step']:05d} | {score}")

    replies, key = sampled * cfg.num_samples, rollout.task_key(task)
    groups = Groups(sampler.model, tokenizer) if over_trees(cfg.trees, model, compute) else None
    stage.objective = cfg.objective if groups is None else OverTrees(cfg.objective)
    stage.set_up(model, tokenizer, cfg, cfg.init_lr_frac)
    stage.resume(Work(steps, replies, sampled, key, cfg.eval_every, measure, measures_first=True))
    sampler.renew(model)
    stage.begin()
    while stage.next_step():
        numbers = fitting[
            epoch_numbers(len(fitting), cfg.seed, stage.step * sampled, sampled)
        ].tolist()
        stage.mark("sampling")
        rolled, samples = rollout.roll_out(
            task,
            numbers,
            cfg.num_samples,
            replace(sampling, seed=cfg.seed * 1_000_003 + stage.step),
            cfg.device_batch_size,
            sampler.model,
            tokenizer,
            compute,
            cfg,
            cfg.shuffle_rewards,
            groups,
            reference.model if reference else None,
        )
        gap = rollout.sampler_gap(samples, model, compute)
        stage.schedule(lrm=1 - stage.step / steps)
        outcome = NO_UPDATE
        for _ in range(cfg.updates_per_rollout if rolled.num_targets else 0):
            outcome = stage.update(rolled)
        stage.mark("sampler's copy")
        sampler.renew(model)
        stage.conclude(
            outcome, {**rolled.figures(), "sampler_gap": gap}, f"{rolled} | sampler gap: {gap:.1e}"
        )


if __name__ == "__main__":
    launch(train, Config, __doc__)
