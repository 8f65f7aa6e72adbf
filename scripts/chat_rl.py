"""Reinforcement learning on problems with checkable answers.

Each step samples replies, grades them, and makes the better ones more likely. The model was trained
here, fine-tuned with scripts.finetune, or published.

python -m scripts.chat_rl
python -m scripts.chat_rl --source tune --problems sums.jsonl
python -m scripts.chat_rl --model ./Qwen3-0.6B --problems sums.jsonl
torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from nanochat.checkpoint_manager.files import latest_step
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent, shown_parent
from nanochat.common import UserError, log, tr
from nanochat.dataloader import epoch_numbers
from nanochat.device import Compute
from nanochat.evals.chat import evaluate
from nanochat.generate.sampling import Sampling
from nanochat.optim import OneRate, Rates
from nanochat.rl import rollout
from nanochat.rl.groups import Groups
from nanochat.rl.policy import PolicyFlags
from nanochat.rl.rewards import Rewards, mean_reward
from nanochat.rl.sampler import Sampler, reference_of
from nanochat.rl.start import Start, open_published, open_tuned
from nanochat.rl.trees import model_arguments, over_trees
from nanochat.run import Plan, Run, launch, load_parent, open_folder
from nanochat.step import NO_UPDATE
from nanochat.tokenizer import Tokenizer
from nanochat.train import sizes, tuning_rules
from nanochat.train.flags import (
    Auto,
    Epochs,
    Free,
    Rare,
    RunFlags,
    StageFlags,
    check_adapter,
    check_ranges,
)
from nanochat.train.samples import Graded
from nanochat.train.setup import set_up
from tasks.mixtures import own_content, rl_tasks


@dataclass(frozen=True)
class AdapterFlags:
    """What is trained of a published or fine-tuned model, and how fast."""

    lora_rank: int | Auto = "auto"
    """rank of the adapter that is trained of a published model; 0: no adapter, every parameter is trained.
    auto: 8, or that of the adapter that scripts.finetune made, which is trained further"""
    lora_alpha: Rare[float] = 16.0
    """what a new adapter adds is multiplied by alpha / rank"""
    learning_rate: Rare[float | Auto] = "auto"
    """learning rate of AdamW for a published model, which then falls linearly to 0.
    auto: by the model's width and the steps, such as 9e-5 for an adapter at 576 channels and 5e-6 for every parameter"""

    @property
    def rank(self) -> int | None:
        """The rank, or None for the default of the start."""
        return None if self.lora_rank == "auto" else self.lora_rank

    def rate(self, width: int, steps: int, adapter: bool) -> float:
        """Return the peak learning rate for `steps` steps of a model with `width` channels."""
        if self.learning_rate != "auto":
            return self.learning_rate
        return tuning_rules.rl_rate(width, steps, adapter)


@dataclass(frozen=True)
class Config:
    """Flags of reinforcement learning."""

    problems: str | None = None
    """JSONL file of your own problems, such as {"question": "...", "answer": "42"}, used instead of the corpus's.
    Every tenth one is held out to measure accuracy"""
    reward: tuple[str, ...] = ()
    """what replies are rewarded for: functions in your own Python file, such as rewards.py:short.
    Several are added up, with weights such as rewards.py:short*0.5; answer stands for the right answer.
    Default: answer"""
    unsafe_exec: Free[Rare[bool]] = False
    """call the functions of --reward even where this machine cannot isolate them in namespaces"""
    model: Free[Path | None] = None
    """folder of a published model to start from, or its OWNER/NAME if hf or modelscope has downloaded it.
    Default: a model that was trained here"""
    source: Free[Literal["sft", "mid", "tune"]] = "sft"
    """stage whose model to start from; tune: what scripts.finetune made, an adapter or a whole model"""
    source_step: Free[Rare[int | None]] = None
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
    temperature: Rare[float] = 1.0
    """sampling temperature, above 0: the higher, the more the replies to a problem differ"""
    top_k: Rare[int] = 50
    """sample from this many of the likeliest tokens; 0: from all tokens"""
    init_lr_frac: float = 0.05
    """factor on the learning rates of a model that was pretrained here, which then fall linearly to 0"""
    adapter: AdapterFlags = AdapterFlags()
    """which parameters of a published model are trained"""
    eval_every: Free[Rare[int]] = 60
    """steps between measurements on held-out problems; 0: measure only before the first step and at the end"""
    eval_examples: Free[Rare[int]] = 400
    """problems per measurement"""
    trees: Free[Rare[bool | None]] = None
    """compute what a problem's replies share at their beginning only once; the result is the same up to rounding.
    default: on CPUs, for models and losses that allow it"""
    shuffle_rewards: Rare[bool] = False
    """shuffle each step's rewards among its replies: a control run that must not learn"""
    stage: StageFlags = StageFlags()
    """the model to train, and the name of the result"""
    epochs: Epochs = Epochs()
    """how long the run is"""
    policy: PolicyFlags = PolicyFlags()
    """how rewards become updates"""
    rates: Rare[Rates] = Rates(weight_decay=0.0)
    """learning rates of the parameters' roles"""
    run: RunFlags = RunFlags()
    """how the run is computed, saved and resumed"""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.top_k == 1:  # as at temperature 0
            raise UserError(
                tr(
                    "--top_k must be 0 or at least 2, since with 1 all replies to a problem "
                    "are alike, got 1: change it, or leave it out"
                ),
                exit_code=2,
            )
        for value, name in ((self.run.compile, "--compile"), (self.run.graphs, "--graphs")):
            if value:
                raise UserError(
                    tr(
                        "RL neither compiles nor captures its passes, whose shapes follow "
                        "the replies, got {name}: leave it out",
                        name=name,
                    ),
                    exit_code=2,
                )
        if self.stage.matmul == "fp8":
            raise UserError(
                tr(
                    "FP8 needs passes of a multiple of 16 tokens, and those of RL follow "
                    "the replies, got --matmul=fp8: leave it out"
                ),
                exit_code=2,
            )


def refuse_tuned(source: str, tag: str | None) -> None:
    """Raise UserError (exit code 2) if a tag belongs to a model of scripts.finetune only."""
    if tag is None or latest_step(checkpoint_dir(source, tag)) is not None:
        return
    if latest_step(checkpoint_dir("tune", tag)) is not None:
        raise UserError(
            tr("{tag} was made by scripts.finetune: name that stage with --source=tune", tag=tag),
            exit_code=2,
        )


def open_start(cfg: Config, compute: Compute) -> Start:
    """Return the model that the flags name, which is loaded later.

    Raises UserError (exit code 2) if flags contradict each other, or if there is no such model.
    """
    flags = cfg.adapter
    stage = cfg.stage
    check_adapter(flags, "lora_alpha")
    if cfg.model is None and cfg.source != "tune":
        refuse_tuned(cfg.source, stage.model_tag)
        new_alpha = flags.lora_alpha != AdapterFlags.lora_alpha
        if flags.rank or new_alpha or flags.learning_rate != "auto":
            raise UserError(
                tr(
                    "--lora_rank, --lora_alpha and --learning_rate are for published models, which "
                    "--model or --source=tune names. For a model that was pretrained here, give "
                    "--init_lr_frac"
                ),
                exit_code=2,
            )
        parent = find_parent(cfg.source, stage.model_tag, cfg.source_step)

        def load() -> tuple[Any, Tokenizer]:
            return load_parent(parent, compute, stage.matmul)

        return Start(parent.tag, parent.identity, parent.corpus, load)
    if stage.matmul != "auto":
        raise UserError(
            tr(
                "--matmul={matmul} is for models that were pretrained here: leave it out",
                matmul=stage.matmul,
            ),
            exit_code=2,
        )
    if cfg.init_lr_frac != Config.init_lr_frac or cfg.rates != Config.rates:
        raise UserError(
            tr(
                "--init_lr_frac and the rates of roles are for models that were pretrained here: "
                "leave them out, and give --learning_rate"
            ),
            exit_code=2,
        )
    shape = (flags.rank, flags.lora_alpha, compute, cfg.run.seed)
    if cfg.model is None:
        return open_tuned(stage.model_tag, cfg.source_step, *shape)
    if cfg.source == "tune" or stage.model_tag is not None or cfg.source_step is not None:
        raise UserError(
            tr(
                "--model names a published model, and --source, --model_tag and --source_step one "
                "that was trained here: give either"
            ),
            exit_code=2,
        )
    return open_published(cfg.model, *shape)


def train(cfg: Config, compute: Compute) -> None:
    """Train a model on problems, resuming from any checkpoint that --resume selects."""
    rewards = Rewards.of(cfg.reward, cfg.unsafe_exec)
    start = open_start(cfg, compute)
    tag = cfg.stage.own_tag(start.name, cfg.problems)
    corpus = cfg.stage.corpus(start.corpus or "")
    identity = {"parent": start.identity, "corpus": corpus, **rewards.fingerprint, **start.facts}
    identity |= own_content(cfg.problems)
    folder = open_folder("rl", tag, cfg, cfg.run, compute, **identity)
    log(
        tr(
            "rl: training {start}; checkpoints go to {path}",
            start=shown_parent(start.identity, start.name),
            path=folder.path,
        )
    )
    sizes.check_for_ranks("examples_per_step", cfg.examples_per_step, compute)
    cfg.policy.check(cfg.max_new_tokens)
    model, tokenizer = start.load()
    train_task, held_out_task = rl_tasks(corpus, cfg.problems, rewards.need_answers)
    task = rewards.over(train_task)
    held_out = rewards.measured(held_out_task)
    rewards.try_out(train_task)
    problems = np.array(rollout.fitting(task, tokenizer, model.config.sequence_len))
    problems_per_step = cfg.examples_per_step * cfg.policy.oversample
    steps = cfg.epochs.steps(len(problems), problems_per_step, "a smaller --examples_per_step")
    log(
        tr(
            "task: {name}, {problems:,} problems; {steps:,} steps of "
            "{problems_per_step} x {num_samples} replies",
            name=task.name,
            problems=len(problems),
            steps=steps,
            problems_per_step=problems_per_step,
            num_samples=cfg.num_samples,
        )
    )

    if start.fill is None:  # pretrained here
        rates = cfg.rates
        scale = cfg.init_lr_frac
    else:
        rates = OneRate(cfg.adapter.rate(model.config.n_embd, steps, start.is_adapter))
        scale = 1.0
    optimizers = set_up(model, rates, scale, folder.path, cfg.run, compute, fill=start.fill)

    sampler = Sampler(model, compute)
    reference = None
    if cfg.policy.kl:  # a copy of the weights before RL, before a checkpoint is loaded
        reference = reference_of(model, sampler, compute)
    sampling = Sampling(cfg.temperature, cfg.top_k or None, cfg.max_new_tokens)
    practice = rollout.Practice(
        cfg.num_samples, sampling, cfg.device_batch_size, cfg.policy, cfg.shuffle_rewards
    )
    greedy = Sampling(temperature=0.0, max_tokens=cfg.max_new_tokens)
    groups = None
    if over_trees(cfg.trees, model, compute):
        groups = Groups(sampler.model, tokenizer)
    ratio_loss = cfg.policy.ratio_loss
    figure_names = () if ratio_loss is None else ratio_loss.figures

    replies_per_step = problems_per_step * cfg.num_samples
    plan = Plan(steps, replies_per_step, problems_per_step, rollout.task_key(task))

    with Run(
        folder, plan, model, tokenizer, optimizers, cfg.run, compute, about=start.about
    ) as run:
        sampler.renew(model)
        for step in run.steps():
            with run.between_steps(cfg.eval_every, ends=True) as due:
                if due:
                    graded = Graded(held_out, cfg.stage.samples, compute)
                    score = evaluate(
                        held_out,
                        sampler.model,
                        tokenizer,
                        compute,
                        greedy,
                        limit=cfg.eval_examples,
                        on_reply=graded.hear,
                    )
                    graded.keep(folder.path, step)
                    if rewards.need_answers:
                        run.record(accuracy=score.accuracy)
                        log(f"step {step:05d} | {score}")
                    else:
                        run.record(held_out_reward=score.accuracy)
                        log(f"step {step:05d} | {mean_reward(score)}")
            if run.ended:
                break

            first_problem = step * problems_per_step
            numbers = epoch_numbers(len(problems), cfg.run.seed, first_problem, problems_per_step)
            run.mark("sampling")
            replies, samples = rollout.roll_out(
                task,
                problems[numbers].tolist(),
                practice.seeded(cfg.run.seed * 1_000_003 + step),
                sampler.model,
                tokenizer,
                compute,
                groups,
                reference,
            )
            sampler_gap = rollout.sampler_gap(samples, model, compute)

            lrm = 1 - step / steps
            optimizers.schedule(lrm, momentum=0.95, decay=1.0)
            outcome = NO_UPDATE
            updates = cfg.policy.updates_per_rollout if replies.num_targets else 0
            for _ in range(updates):
                with run.update(replies.num_targets, figure_names) as update:
                    for idx, targets, *extra_tensors in update.passes(replies.micro_batches):
                        extras = dict(zip(replies.extras, extra_tensors, strict=True))
                        loss_figures = None
                        if ratio_loss is None:
                            loss = model(idx, targets, reduction="sum", **model_arguments(extras))
                        else:
                            loss, loss_figures = ratio_loss(model, idx, targets, **extras)
                        update.add(loss, loss_figures)
                        (loss * update.factor).backward()
                    outcome = update.step()
            run.mark("sampler's copy")
            sampler.renew(model)
            figures = {**replies.figures(), "sampler_gap": sampler_gap}
            run.finish(outcome, lrm, figures, f"{replies} | sampler gap: {sampler_gap:.1e}")


if __name__ == "__main__":
    launch(train, Config, __doc__)
