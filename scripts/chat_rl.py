"""Reinforcement learning on problems with checkable answers: sample, grade, and make the better replies likelier.

python -m scripts.chat_rl
torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from nanochat import dataloader, device, report
from nanochat.checkpoint_manager.load import held_in, load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent, make_meta
from nanochat.checkpoint_manager.resume import finished, resume_stage
from nanochat.checkpoint_manager.save import save_checkpoint
from nanochat.common import UserError, log, run, settings
from nanochat.device import Compute
from nanochat.evals.chat import evaluate
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT
from nanochat.runtime import fingerprint, parallel, profiling, watch
from nanochat.train import loop, rollout
from nanochat.train.optim import Optimizers, Rates
from tasks.mixtures import rl_tasks


@dataclass(frozen=True)
class Config(loop.StageFlags, Rates):
    """Flags of reinforcement learning."""

    source: Literal["sft", "mid"] = "sft"
    """stage to start from"""
    source_step: int | None = None
    """step of the checkpoint to start from; default the newest"""
    num_epochs: float = 1.0
    """passes over the problems"""
    num_iterations: int | None = None
    """steps; takes precedence over num_epochs"""
    examples_per_step: int = 16
    """problems of a step, over all devices"""
    num_samples: int = 16
    """replies to each problem"""
    device_batch_size: int = 8
    """replies of a training pass on one device, at most; it does not change what is learned"""
    max_new_tokens: int = 256
    """longest reply"""
    temperature: float = 1.0
    """of sampling"""
    top_k: int = 50
    """of sampling; 0 = all tokens"""
    init_lr_frac: float = 0.05
    """factor on all learning rates, which then fall linearly to 0"""
    weight_decay: float = 0.0
    """Muon's decay"""
    eval_every: int = 60
    """steps between measurements on problems that are not trained; 0 = only before the first step and at the end"""
    eval_examples: int = 400
    """problems of a measurement"""
    shuffle_rewards: bool = False
    """deal the rewards of a step to its replies at random: a control that must not learn"""


def train(cfg: Config, compute: Compute) -> None:
    """Train over the problems, going on from the newest checkpoint if there is one."""
    loop.begin(cfg, compute)
    parent = find_parent(cfg.source, cfg.model_tag, cfg.source_step)
    folder = checkpoint_dir("rl", parent.tag)
    corpus = cfg.data or parent.corpus
    wanted = {**settings(cfg), "parent": parent.identity, "corpus": corpus}
    fingerprint.check_start(wanted, compute)
    if finished(folder, wanted, compute, report.has_training_section("rl", parent.tag), cfg.resume):
        return
    if cfg.examples_per_step % compute.world_size:
        raise UserError(
            f"examples_per_step must be a multiple of the {compute.world_size} ranks, got {cfg.examples_per_step}", 2
        )
    loaded = load_model(cfg.source, parent.tag, parent.step, compute, dtype=device.MASTER)
    model, tokenizer, shape = loaded.model, loaded.tokenizer, loaded.model.config
    counts, flops = model.parameter_counts(), model.flops_per_token()
    task, held_out = rl_tasks(corpus)
    task_key = rollout.task_key(task)
    steps = cfg.num_iterations or max(int(cfg.num_epochs * len(task)) // cfg.examples_per_step, 1)
    log(
        f"task: {task.name}, {len(task):,} problems; {steps:,} steps of {cfg.examples_per_step} x {cfg.num_samples} "
        "replies"
    )

    # The sampler is a whole copy of the model in the compute dtype; the trained one may be sharded.
    sampler = GPT(shape, dtype=compute.dtype, operations=compute.operations).to(compute.device).eval()
    held_in(sampler, compute.dtype)
    parallel.shard(model, model.shard_groups(), compute, cfg.shard)
    optimizers = Optimizers(model, model.parameter_roles(), shape.n_embd, cfg, cfg.init_lr_frac, compute.dtype)
    resumed = resume_stage(folder, model, optimizers, wanted, compute, task_key, cfg.resume, cfg.other_code)
    replies = cfg.examples_per_step * cfg.num_samples
    step, meter = resumed.step, loop.Meter.start(steps, replies, flops, compute, resumed.state)
    scale, spikes = loop.LossScale.start(compute, resumed.state), loop.Spikes.start(resumed.state)
    stage = loop.Stage("rl", folder, cfg, meter, step, compute, resumed.state)
    sampling = Sampling(cfg.temperature, cfg.top_k or None, cfg.max_new_tokens, cfg.seed)
    greedy = Sampling(temperature=0.0, max_tokens=cfg.max_new_tokens)
    parallel.refresh(sampler, model)

    def finish(line: dict[str, Any]) -> None:
        """Measure where that is due, and log a step."""
        if line["step"] in (0, steps) or loop.due(line["step"], cfg.eval_every, False):
            score = evaluate(held_out, sampler, tokenizer, compute, greedy, limit=cfg.eval_examples)
            line["accuracy"] = score.accuracy
            log(f"step {line['step']:05d} | {score}")
        stage.tracker.log(**line)

    def save(line: dict[str, Any]) -> float:
        """Save the step of a line; returns what that took."""
        state = {
            **loop.state(meter, scale, line, spikes),
            "row": line["step"] * cfg.examples_per_step,
            "data": task_key,
        }
        meta = make_meta("rl", shape, wanted, steps, state)
        return save_checkpoint(folder, line["step"], model, optimizers, tokenizer, meta, compute, cfg.keep)

    stage.ready(step, finish, first={"step": 0})
    while step < stage.stop:
        stage.start()
        first = step * cfg.examples_per_step
        numbers = dataloader.epoch_numbers(len(task), cfg.seed, first, cfg.examples_per_step).tolist()
        profiling.mark("sampling")
        rolled, samples = rollout.roll_out(
            task, numbers, cfg.num_samples, replace(sampling, seed=cfg.seed * 1_000_003 + step), cfg.device_batch_size,
            sampler, tokenizer, compute, cfg.shuffle_rewards,
        )  # fmt: skip
        gap = rollout.sampler_gap(samples, model, compute)
        lrm = 1 - step / steps
        optimizers.schedule(lrm, 0.95, 1.0)
        outcome = (
            loop.update(model, optimizers, rolled, scale, compute, spikes) if rolled.num_targets else loop.NO_UPDATE
        )
        profiling.mark("sampler's copy")
        parallel.refresh(sampler, model)
        step += 1
        line = stage.tick(step, outcome, lrm)
        line |= {"reward": rolled.reward, "length": rolled.length, "entropy": rolled.entropy, "flat": rolled.flat,
                 "truncated": rolled.truncated, "sampler_gap": gap}  # fmt: skip
        log(f"step {step:05d} | reward: {rolled.reward:.3f} | length: {rolled.length:.1f} | "
            f"entropy: {rolled.entropy:.3f} | equal groups: {rolled.flat:.0%} | cut off: {rolled.truncated:.0%} | "
            f"sampler gap: {gap:.1e}")  # fmt: skip
        stage.conclude(line, save, finish)
    stage.close()
    if stage.complete(step) and compute.main:
        report.training_section("rl", parent.tag, folder, wanted, device.summary(compute, counts["total"]))
    loop.log_end(folder, step, steps)


if __name__ == "__main__":
    run(watch.guarded(train), Config, __doc__)
