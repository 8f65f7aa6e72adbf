"""Fine-tune a published model (Qwen1.5 to Qwen3.5, Llama), or an adapter of it, on your own data.

The data are conversations, or preferences with --loss=dpo.

python -m scripts.finetune --model ./Qwen3-0.6B --data chats.jsonl
python -m scripts.finetune --model ./Qwen3-0.6B --data preferences.jsonl --loss=dpo
torchrun --standalone --nproc_per_node=8 -m scripts.finetune -- --model ./Qwen2.5-7B --data chats.jsonl --shard=full
python -m scripts.chat_cli -i tune
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch.nn as nn
from torch import Tensor
from tyro.conf import arg

from nanochat import schedule
from nanochat.checkpoint_manager.huggingface.base import Base, open_base
from nanochat.checkpoint_manager.huggingface.folders import model_name, published_folder
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.checkpoint_manager.resume import begun_settings
from nanochat.common import UserError, log, tr
from nanochat.context import Packed
from nanochat.data.command_line import given
from nanochat.data.sources.listing import name_of
from nanochat.dataloader import Source
from nanochat.device import Compute, seed_all
from nanochat.meter import listed
from nanochat.models.lora import LoraConfig
from nanochat.models.nf4 import BITS
from nanochat.models.qwen.model import Qwen
from nanochat.optim import OneRate
from nanochat.planner import expected
from nanochat.planner.forecast import Tuning
from nanochat.planner.needs import log_needs
from nanochat.planner.tuning import check_fits
from nanochat.platforms.base import dtype_name
from nanochat.prepare.conversations import conversation_lengths
from nanochat.prepare.interleave import rows_with
from nanochat.prepare.plan import TooLong
from nanochat.run import Plan, Run, RunFolder, launch, open_folder
from nanochat.train import replay, sizes, tuning_rules
from nanochat.train.chat_rows import PairRows, chat_rows
from nanochat.train.embedding_noise import EmbeddingNoise
from nanochat.train.fit import probe
from nanochat.train.flags import (
    Auto,
    ExampleFlags,
    Free,
    Rare,
    RunFlags,
    TuningEpochs,
    check_adapter,
    check_ranges,
)
from nanochat.train.forgetting import FIGURE, GeneralText, before_training, read_passages
from nanochat.train.preferences import PreferenceLoss, add_references
from nanochat.train.setup import check_room, set_up
from nanochat.train.sizes import Batch
from nanochat.train.validation import Validation, validation_line
from tasks.mixtures import Mix, own_conversations, own_pairs, split_weight

# A fact that no flag names: whether the device could hold the whole model when the run began.
ROOM_FACT = "room for own words"


@dataclass(frozen=True)
class LossFlags:
    """The objective of training, and the settings of dpo."""

    loss: Literal["answers", "dpo"] = "answers"
    """what is learned; answers: to say what the assistant says in the data.
    dpo: to find the answers that the data prefers likelier than the others (direct preference optimisation)"""
    dpo_beta: float = 0.1
    """how far dpo holds the model to what it said before training; lower it to let the model move further away"""
    dpo_label_smoothing: Rare[float] = 0.0
    """share of the preferences that may be the wrong way round, below 0.5; raise it for noisy data"""
    dpo_sft_weight: Rare[float] = 0.0
    """weight of the preferred answers' own loss, per token, which dpo adds.
    Raise it, to 1 for example, where preferred answers become less likely too"""

    @property
    def preference(self) -> PreferenceLoss | None:
        """The loss for pairs of answers, or None to learn from conversations.

        Raises UserError if a flag is out of range.
        """
        loss = PreferenceLoss(self.dpo_beta, self.dpo_label_smoothing, self.dpo_sft_weight)
        return loss if self.loss == "dpo" else None

    def check(self) -> None:
        """Raise UserError (exit code 2) if a setting of dpo is given and another loss is learned."""
        if self.loss == "dpo":
            return
        for name in given(self, ("dpo_beta", "dpo_label_smoothing", "dpo_sft_weight")):
            raise UserError(
                tr(
                    "--{name} is a setting of --loss=dpo, and the loss is {loss}: add "
                    "--loss=dpo, or leave --{name} out",
                    name=name,
                    loss=self.loss,
                ),
                exit_code=2,
            )


@dataclass(frozen=True)
class AdapterFlags:
    """The shape of the adapter that is trained."""

    lora_rank: int = 8
    """rank of the adapter; 0: no adapter, every parameter is trained"""
    lora_alpha: float = 16.0
    """what the adapter adds is multiplied by alpha / rank"""
    lora_dropout: float = 0.0
    """share of a matrix's inputs that the adapter does not see in training"""
    lora_targets: tuple[str, ...] = LoraConfig.targets
    """matrices that get an adapter"""
    rslora: Rare[bool] = False
    """multiply by alpha / sqrt(rank) instead, which keeps high ranks learning"""
    base_bits: Rare[Literal[16, 4]] = 16
    """bits of each weight of the frozen layers.
    16: they are in the number format of the computation.
    4: they are in NF4 with double quantisation, a quarter of that memory, and a step takes a little longer"""

    @property
    def shape(self) -> LoraConfig | None:
        """The shape of the adapter, or None to train every parameter."""
        if self.lora_rank == 0:
            return None
        return LoraConfig(
            self.lora_rank, self.lora_alpha, self.lora_dropout, self.lora_targets, self.rslora
        )

    @property
    def trained(self) -> str:
        """What is trained, for messages to users."""
        if self.lora_rank == 0:
            return tr("every parameter")
        if self.base_bits == BITS:
            return tr("an adapter of rank {rank} on 4 bits", rank=self.lora_rank)
        return tr("an adapter of rank {rank}", rank=self.lora_rank)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Flags of fine-tuning a published model."""

    model: Free[Path]
    """folder of the model: config.json, tokenizer.json and safetensors files.
    Or OWNER/NAME, if hf or modelscope has downloaded that model"""
    data: Free[tuple[str, ...]]
    """files, folders or patterns of conversations, or of preferences with --loss=dpo.
    They are JSONL, JSON, CSV or parquet; docs/data.md has the layouts.
    FILE:2 takes the records of a file twice, FILE:0.5 every second one"""
    skip_bad_lines: Rare[bool] = False
    """leave out the lines that cannot be used, and say how many they are.
    By default such a file is refused"""
    objective: LossFlags = LossFlags()
    """what is learned"""
    adapter: AdapterFlags = AdapterFlags()
    """the adapter that is trained"""
    learning_rate: float | Auto = "auto"
    """learning rate of AdamW; auto: by what is trained, the model's width and the number of steps.
    400 steps at 576 channels take 1.4e-3 for an adapter and 1e-4 for every parameter; dpo takes 5e-5 and 5e-6.
    Wider models and longer runs take less"""
    weight_decay: float = 0.0
    """decay of matrices and adapters"""
    warmup_ratio: float = 0.03
    """share of the run over which the learning rate rises; then it falls to 0 as a cosine"""
    max_length: int | Auto = "auto"
    """tokens of a row, and of the longest conversation; a row holds several conversations that cannot see each other.
    auto: 2,048, or fewer where the data is small and its longest conversation fits.
    With dpo a row holds both answers of a pair, each after its prompt"""
    too_long: Rare[TooLong] = "cut"
    """conversations or pairs longer than a row: cut keeps their beginning, drop leaves them out"""
    checkpoint_activations: Free[bool] = False
    """keep only the inputs of layers for the backward pass and compute each layer again: less memory, a third slower"""
    offload_activations: Free[bool] = False
    """like --checkpoint_activations, and move these inputs to the host's memory until the backward pass"""
    out_tag: Annotated[Free[str | None], arg(aliases=["--out"])] = None
    """name of the result; default: the names of the model and of the first file"""
    eval_every: Free[int] = 100
    """steps between validations; 0: never validate"""
    replay_every: Rare[int | Auto] = "auto"
    """one row in so many holds the model's own words, which it writes before training, so that it forgets less.
    0: none; auto: 4 for data of up to a million tokens, if the whole model fits the device. dpo has none"""
    embedding_noise: Rare[float | Auto] = "auto"
    """random noise on what the model reads in training, as a share of each embedding's size (NEFTune).
    It helps a small model to answer questions in other wordings. 0: none.
    auto: none from 576 channels up and with dpo, and up to 0.7 for narrower models"""
    general_text: Rare[Path | None] = None
    """text file on which each validation also measures the perplexity, to show what the model forgets.
    Blank lines separate passages, and no passage may be in the data.
    Default: English and Chinese passages of the package"""
    forecast: Rare[Free[bool]] = False
    """print the memory, the disk space and the time that the run needs, and end before it trains.
    The data is read and tokenized for that, which the run then does not repeat"""
    epochs: TuningEpochs = TuningEpochs()
    """how long the run is"""
    batch: ExampleFlags = ExampleFlags(target_examples_per_step="auto")
    """how a step is split"""
    run: RunFlags = RunFlags()
    """how the run is computed, saved and resumed"""

    def __post_init__(self) -> None:
        check_ranges(self)
        if not self.data:
            raise UserError(
                tr(
                    "--data needs at least one file of conversations, got none: name one, "
                    "such as a.jsonl"
                ),
                exit_code=2,
            )
        self.objective.check()
        check_adapter(self.adapter, "lora_alpha", "lora_dropout", "lora_targets", "rslora")
        if self.adapter.base_bits == BITS and self.adapter.lora_rank == 0:
            raise UserError(
                tr(
                    "--base_bits=4 freezes the weights that it holds in 4 bits, and --lora_rank=0 "
                    "trains them: leave one of the two out"
                ),
                exit_code=2,
            )
        if self.run.graphs:
            raise UserError(
                tr(
                    "--graphs captures passes over rows of one document, and those of fine-tuning "
                    "hold several conversations: leave it out"
                ),
                exit_code=2,
            )

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes each layer a second time."""
        return self.checkpoint_activations or self.offload_activations

    def rate(self, width: int, steps: int, own_words: bool) -> float:
        """Return the peak learning rate for `steps` steps of a model with `width` channels.

        `own_words` says whether the rows hold some of the model's own words.
        """
        if self.learning_rate != "auto":
            return self.learning_rate
        preferences = self.objective.loss == "dpo"
        rate = tuning_rules.tuning_rate(
            width, steps, self.adapter.lora_rank > 0, preferences, own_words
        )
        log(
            tr(
                "learning_rate: {rate:.2g} (for {trained}, {width:,} channels and {steps:,} "
                "steps, loss {loss})",
                rate=rate,
                trained=self.adapter.trained,
                width=width,
                steps=steps,
                loss=self.objective.loss,
            )
        )
        return rate

    def noise_share(self, width: int) -> float:
        """Return the share of an embedding's size that a model of `width` channels gets as noise."""
        if self.embedding_noise != "auto":
            return self.embedding_noise
        return 0.0 if self.objective.loss == "dpo" else tuning_rules.tuning_noise(width)

    @property
    def tag(self) -> str:
        """The tag of the resulting model."""
        if self.out_tag is not None:
            return self.out_tag
        first_file, _ = split_weight(self.data[0])
        name = model_name(published_folder(self.model)).rpartition("/")[2]
        return f"{name}-{name_of(first_file)}"


def embedding_noise(cfg: Config, model: Qwen, compute: Compute) -> EmbeddingNoise | None:
    """Return the noise that the model reads from now on, or None if it reads none."""
    width = model.config.n_embd
    share = cfg.noise_share(width)
    if share == 0:
        return None
    log(
        tr(
            "embedding_noise: {share:g} (for {width:,} channels and loss {loss})",
            share=share,
            width=width,
            loss=cfg.objective.loss,
        )
    )
    noise = EmbeddingNoise(share, width, cfg.run.seed, compute)
    model.embedding_noise = noise
    return noise


def dropout_seed(seed: int, step: int, rank: int) -> int:
    """Return the dropout seed of a step on a rank: below 2**63, and the same after a resume."""
    return ((seed * 1_000_003 + step) * 65_537 + rank) % 2**63


def row_tokens(cfg: Config, mixture: Mix, base: Base) -> int:
    """Return the tokens per row: --max_length or, if that is auto, a length that suits the data."""
    if cfg.max_length != "auto":
        return cfg.max_length
    lengths = conversation_lengths("tune", mixture, base.tokenizer, mixture.together)
    total = int(lengths.sum())
    longest = int(lengths.max())
    length = tuning_rules.tuning_row_tokens(
        total, len(lengths), longest, base.model.config.sequence_len
    )
    log(
        tr(
            "max_length: {length:,} tokens a row (for {total:,} tokens, the longest of "
            "{longest:,})",
            length=length,
            total=total,
            longest=longest,
        )
    )
    return length


def pass_loss(
    preference: PreferenceLoss | None, model: nn.Module, *tensors: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the summed loss () of a pass, and the sums (F,) of its figures or None.

    `tensors` are the inputs, targets and documents of packed rows and, with `preference`, the
    references that add_references() computed. With --replay_every, they are those of AnchoredRows.
    The figures are those of `preference` or of anchored_loss().
    """
    if preference is None and len(tensors) == 4:
        idx, targets, documents, references = tensors
        losses = model(idx, targets, "none", context=Packed(documents))
        return replay.anchored_loss(losses, references)
    if preference is None:
        idx, targets, documents = tensors
        return model(idx, targets, reduction="sum", context=Packed(documents)), None
    idx, targets, documents, references = tensors
    sums = preference(model, idx, targets, documents=documents, references=references)
    return sums[0], sums[1:]


def figure_names(preference: PreferenceLoss | None, replays: bool) -> tuple[str, ...]:
    """Return the names of the figures that pass_loss() sums."""
    if replays:
        return replay.FIGURES
    return preference.figures if preference else ()


def compute_references(source: Source, base: Base, batch_rows: int, compute: Compute) -> None:
    """Compute what the model says before training, for rows whose loss compares with that.

    A forward pass has at most `batch_rows` rows.
    """
    if isinstance(source, PairRows):
        add_references(source, base.model, base.outputs, batch_rows, compute)
    elif isinstance(source, replay.AnchoredRows):
        replay.add_references(source, base.model, base.outputs, batch_rows, compute)


def forecast_of(cfg: Config, batch: Batch, base: Base, compute: Compute) -> Tuning:
    """Return what the planner needs in order to predict the memory and the time of the run."""
    return Tuning(
        base.model.config,
        cfg.adapter.shape,
        rows=1 if batch.probe else batch.device_batch_size,
        several_passes=batch.passes > 1,
        checkpoint_activations=cfg.recomputes,
        offload_activations=cfg.offload_activations,
        shard=cfg.run.shard,
        ranks=compute.world_size,
        dtype=dtype_name(compute.dtype),
        on_host=not compute.platform.has_own_memory,
        base_bits=cfg.adapter.base_bits,
    )


def validate(
    run: Run,
    validation: Validation,
    general: GeneralText,
    preference: PreferenceLoss | None,
    rows: int,
) -> None:
    """Measure what is learned and what is forgotten, with `rows` rows a pass; log and record both."""
    if preference:
        means = validation.means(preference, rows)
        run.record(**{f"val_{name}": mean for name, mean in means.items()})
        figures = listed(means)
        log(tr("step {step:05d} | validation: {figures}", step=run.step, figures=figures))
    else:
        val_bpb = validation.bits_per_byte(rows)
        run.record(val_bpb=val_bpb)
        log(validation_line(run.step, val_bpb, of_answers=True))
    run.record(**{FIGURE: general.measure(run.step, rows)})


def open_model(cfg: Config, compute: Compute) -> Base:
    """Return the model to tune, whose rows have --max_length tokens if that is a number."""
    base = open_base(
        cfg.model,
        None if cfg.max_length == "auto" else cfg.max_length,
        cfg.adapter.shape,
        compute,
        cfg.run.seed,
        cfg.adapter.base_bits,
    )
    base.warn_if_replies_never_end()
    return base


def room_for_own_words(cfg: Config, base: Base, compute: Compute) -> bool:
    """Return whether the device can hold the whole model, or could when the run began.

    Every rank must call this. Raises UserError if a new run cannot have own words as its flags ask.
    """
    begun = begun_settings(checkpoint_dir("tune", cfg.tag), cfg.run.resume, compute)
    if begun:
        return begun.get(ROOM_FACT) == "yes"  # the first runs of version 1.0.0 lack it
    replay.check_replay(cfg.replay_every, cfg.objective.loss, base, compute)
    return replay.has_room(base, compute)


def open_run(cfg: Config, base: Base, mixture: Mix, has_room: bool, compute: Compute) -> RunFolder:
    """Return the folder of the run, after checking that it can be used; see open_folder()."""
    folder = open_folder(
        "tune",
        cfg.tag,
        cfg,
        cfg.run,
        compute,
        parent=base.identity,
        corpus=mixture.name,
        content=mixture.key,
        **{ROOM_FACT: "yes" if has_room else "no"},
        **base.facts,
    )
    log(
        tr(
            "tune: {trained} of {name}; checkpoints go to {path}",
            trained=cfg.adapter.trained,
            name=base.folder.name,
            path=folder.path,
        )
    )
    return folder


def train(cfg: Config, compute: Compute) -> None:
    """Fine-tune a model, resuming from any checkpoint that --resume selects."""
    preference = cfg.objective.preference
    passages = read_passages(cfg.general_text)
    base = open_model(cfg, compute)
    has_room = room_for_own_words(cfg, base, compute)
    read_mixture = own_pairs if preference else own_conversations
    mixture = read_mixture(cfg.data, cfg.skip_bad_lines)
    folder = open_run(cfg, base, mixture, has_room, compute)

    # The length of rows, how a step is split, and how long the run is
    length = row_tokens(cfg, mixture, base)
    base = base.with_rows_of(length)
    model = base.model
    tokenizer = base.tokenizer
    model.checkpoints = cfg.recomputes
    model.offloads = cfg.offload_activations
    rows, val_rows = chat_rows(
        "tune",
        mixture,
        tokenizer,
        length,
        cfg.run.seed,
        masked=True,
        too_long=cfg.too_long,
        pairs=preference is not None,
    )
    batch = sizes.example_batch(
        cfg.batch,
        model.config,
        base.equivalent_parameters,
        rows,
        mixture.name,
        compute,
        folder.begun_rows,
    )
    replay_every = replay.resolve_every(cfg.replay_every, cfg.objective.loss, rows, has_room)
    epochs = cfg.epochs.resolved(rows.conversations, model.config.n_embd)
    row_count = rows_with(rows.count, replay_every)
    steps = epochs.steps_over(
        row_count, length, batch.rows_per_step, mixture.name, cfg.batch.smaller_steps
    )
    tuning = forecast_of(cfg, batch, base, compute)
    check_fits(tuning, model, compute, always=cfg.forecast)
    if cfg.forecast:
        run = cfg.run
        log_needs(tuning, model, batch, steps, folder.path, run.keep, run.resume, compute)
        return
    rates = OneRate(cfg.rate(model.config.n_embd, steps, replay_every > 0), cfg.weight_decay)
    noise = embedding_noise(cfg, model, compute)
    if replay_every:
        check_room(model, rates, folder.path, cfg.run.resume)
        run_rows = steps * batch.rows_per_step
        rows = replay.with_own_words(rows, replay_every, base, run_rows, cfg.run.seed, compute)

    # The published weights, and AdamW for their adapters or for all of them
    optimizers = set_up(model, rates, 1.0, folder.path, cfg.run, compute, fill=base.fill)
    # Before a checkpoint is loaded, the model is its own reference.
    for source in (rows, val_rows):
        compute_references(source, base, batch.device_batch_size, compute)
    val_tokens = 20 * batch.tokens_per_step
    validation = Validation(val_rows, val_tokens, model, tokenizer, 0, compute)
    plan = Plan(steps, batch.tokens_per_step, batch.rows_per_step, rows.key)
    names = figure_names(preference, replay_every > 0)

    def summed_loss(fast: nn.Module, *tensors: Tensor) -> Tensor:
        return pass_loss(preference, fast, *tensors)[0]

    with Run(folder, plan, model, tokenizer, optimizers, cfg.run, compute, about=base.about) as run:
        batch = probe.fit(batch, model, optimizers, length, compute)
        tuning = replace(tuning, rows=batch.device_batch_size)
        step_seconds = expected.of_tuning(tuning, batch.passes, compute)
        fast = run.prepare(rows, batch, summed_loss, step_seconds)
        batches = run.batches(rows, batch)
        before = before_training(folder.path) if run.step else None
        general = GeneralText(passages, model, tokenizer, compute, before)
        for step in run.steps():
            with run.between_steps(cfg.eval_every, ends=cfg.eval_every > 0) as due:
                if due:
                    validate(run, validation, general, preference, batch.device_batch_size)
            if run.ended:
                break

            seed_all(dropout_seed(cfg.run.seed, step, compute.rank))
            if noise is not None:
                noise.renew(step)
            lrm = schedule.cosine(step, steps, cfg.warmup_ratio)
            optimizers.schedule(lrm, momentum=0.95, decay=1.0)
            data = next(batches)
            with run.update(data.num_targets, names) as update:
                for tensors in update.passes(data.micro_batches):
                    loss, figures = pass_loss(preference, fast, *tensors)
                    update.add(loss, figures)
                    (loss * update.factor).backward()
                outcome = update.step()
            means = None
            if replay_every:
                # Means stand on the step's own line, where sums would get a second line.
                means = replay.mean_losses(outcome.figures)
                outcome = replace(outcome, figures={})
            run.finish(outcome, lrm, means)


if __name__ == "__main__":
    launch(train, Config, __doc__)
