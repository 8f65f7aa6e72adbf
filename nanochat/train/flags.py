"""Defines the flags that training scripts share.

A flag of type Free[...] changes how a run works but not what it learns, so a run may resume with
another value.
"""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from nanochat import schedule
from nanochat.checkpoint_manager.parts.model import Files
from nanochat.common import UserError, log, tr, warn
from nanochat.data.command_line import Free as Free
from nanochat.data.command_line import Rare as Rare
from nanochat.data.command_line import given, values_of
from nanochat.data.mixing import resolve_data, unweighted
from nanochat.data.sources.listing import name_of
from nanochat.data.sources.published import SOURCES
from nanochat.dataloader import Source, split_rows
from nanochat.platforms.operations import KernelChoice, Matmul
from nanochat.prepare.interleave import blend
from nanochat.runtime.parallel import Sharding
from nanochat.tokenizer import Tokenizer
from nanochat.train import tuning_rules

Auto = Literal["auto"]
Family = Literal["gpt", "qwen3"]  # kinds of models that can be trained from scratch
WINDOWS = "SSSL"  # the default attention windows of a GPT
FEW_STEPS = 20  # a stage with fewer steps gives a warning

# The smallest values of flags with counts, times and rates. Other flags are checked where they are
# used: shapes in sizes.py, adapters in LoraConfig, losses in PreferenceLoss and PolicyFlags.
LEAST = {
    "num_iterations": 1,
    "stop_at": 1,
    "total_batch_size": 1,
    "device_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "target_examples_per_step": 1,
    "examples_per_step": 1,
    "num_samples": 2,
    "max_new_tokens": 1,
    "max_length": 1,
    "eval_tokens": 1,
    "eval_examples": 1,
    "eval_every": 0,
    "core_every": 0,
    "core_examples": 1,
    "save_every": 0,
    "save_seconds": 0,
    "keep": 0,
    "hang_seconds": 0,
    "samples": 0,
    "resume": 0,
    "seed": 0,
    "base_step": 0,
    "source_step": 0,
    "documents_every": 0,
    "replay_every": 0,
    "embedding_noise": 0,
    "top_k": 0,
    "warmup_steps": 0,
    "warmup_ratio": 0,
    "warmdown_ratio": 0,
    "final_lr_frac": 0,
    "init_lr_frac": 0,
    "weight_decay": 0,
    "learning_rate": 0,
    "unembedding_lr": 0,
    "embedding_lr": 0,
    "matrix_lr": 0,
    "scalar_lr": 0,
}
BELOW = {"seed": 2**63}  # the limit of torch's generators and of numpy
ABOVE_ZERO = (
    "num_epochs",
    "target_flops",
    "target_param_data_ratio",
    "lora_alpha",
    "temperature",
)  # and finite
SWITCHED_OFF_AT_0 = (
    "eval_every",
    "core_every",
    "save_every",
    "save_seconds",
    "hang_seconds",
    "documents_every",
    "top_k",
)


def _why(name: str) -> str:
    """Return why a flag has its limit, or what 0 means, as the continuation of a message."""
    if name in SWITCHED_OFF_AT_0:
        return tr(" (0 switches it off)")
    return {
        "num_samples": tr(", since a reply is judged against the others to its problem"),
        "samples": tr(" (0 switches them off)"),
        "keep": tr(" (0 keeps all)"),
        "temperature": tr(
            ", since at 0 all replies to a problem are alike, and none is better than the others"
        ),
    }.get(name, "")


def check_ranges(cfg: Any) -> None:
    """Raise UserError (exit code 2) if any numeric flag is too small or too large.

    Values that are not numbers, such as "auto" and None, are not checked.
    """
    for name, value in values_of(cfg).items():
        if isinstance(value, int | float):
            _check_range(name, value)


def _check_range(name: str, value: float) -> None:
    if name in LEAST:
        fits = value >= LEAST[name]
        rule = tr("at least {least}", least=LEAST[name])
    else:
        fits = name not in ABOVE_ZERO or 0 < value < math.inf
        rule = tr("finite and above 0")
    if not fits:
        reason = _why(name)
        raise UserError(
            tr(
                "--{name} must be {rule}{reason}, got {value}: change it, or leave it out",
                name=name,
                rule=rule,
                reason=reason,
                value=value,
            ),
            exit_code=2,
        )
    if value >= BELOW.get(name, math.inf):
        raise UserError(
            tr(
                "--{name} must be below {limit}, got {value}: change it, or leave it out",
                name=name,
                limit=BELOW[name],
                value=value,
            ),
            exit_code=2,
        )


def check_adapter(flags: Any, *shape: str) -> None:
    """Raise UserError (exit code 2) if `flags` shape an adapter and say that none is trained.

    `shape` names the flags that do, which may then have their defaults only.
    """
    if flags.lora_rank != 0:
        return
    for name in given(flags, shape):
        raise UserError(
            tr(
                "--{name} shapes an adapter, and --lora_rank=0 trains every parameter: "
                "leave one of the two out",
                name=name,
            ),
            exit_code=2,
        )


@dataclass(frozen=True)
class RunFlags:
    """The flags of every training script, which say how it runs."""

    run: Free[Rare[str]] = "dummy"
    """name of the wandb run that gets the figures too; dummy: no wandb"""
    track: Free[str] = "jsonl"
    """where the figures go, with commas between: wandb, swanlab, tensorboard, and jsonl, which is always written.
    A mode may follow: wandb:offline, swanlab:local, swanlab:offline"""
    device_type: Free[str] = ""
    """device to train on: npu, cuda, mps or cpu; empty: the first that works, except mps"""
    save_every: Free[int] = 0
    """steps between checkpoints; 0: save by time and at the end only"""
    save_seconds: Free[Rare[float]] = 60.0
    """seconds between checkpoints, longer where saving is slow; 0: never save by time"""
    keep: Free[Rare[int]] = 3
    """number of newest checkpoints to keep; 0: keep all"""
    checkpoint_files: Free[Rare[Files]] = "auto"
    """how many files the parameters of a checkpoint make; one: a single file, which rank 0 writes.
    per_rank: every rank writes the rows that it holds; auto: one up to 5 GB, or where a rank holds the whole model"""
    resume: Free[int | Literal["auto", "none"]] = "auto"
    """step to resume from; auto: the newest undamaged checkpoint; none: start again from step 0.
    Checkpoints after that step are moved aside"""
    other_code: Free[bool] = False
    """resume although the code has changed since the checkpoint was saved"""
    hang_seconds: Free[Rare[float]] = 600.0
    """seconds without progress on one rank after which all ranks end; 0: wait for ever"""
    stop_at: Free[int | None] = None
    """step after which to save and stop; the same command without this flag resumes"""
    compile: Free[bool | None] = None
    """use torch.compile; default: where it works and the steps left in this run repay its time"""
    graphs: Free[bool] = False
    """replay each pass, and on NPUs each Muon step, as one captured launch; needs one NPU or GPU, and no compiler.
    Try it where the host cannot launch operators fast enough: small models, few rows per pass"""
    kernels: Free[KernelChoice] = "auto"
    """operators to compute with; auto: the fastest that the device has; plain: torch's.
    fused: the device's own fused operators; an error where there are none"""
    shard: Free[Sharding] = "grad"
    """what the ranks shard; none: nothing; grad: gradients and optimizer state (ZeRO-2).
    full: parameters too (ZeRO-3); take it when memory is short"""
    seed: Rare[int] = 42
    """seed of the initial parameters, the order of rows and sampling"""
    profile: Free[bool] = False
    """time and trace ten steps, write tables and a trace to the folder profile beside the checkpoints, then continue"""


@dataclass(frozen=True)
class StageFlags:
    """The flags of every stage after pretraining, such as the model that the stage starts from."""

    data: Free[str | None] = None
    """corpus by name, the folder it was imported from, or a mixture such as web:0.7,books:0.3.
    default: the parent's"""
    model_tag: Free[str | None] = None
    """name of the model to train; default: the newest"""
    out_tag: Free[str | None] = None
    """name under which this stage saves its checkpoints. default: the model's own name.
    With --conversations, --mix or --problems the name of that file is added, such as d4-mychats"""
    matmul: Matmul = "auto"
    """number format in which the large matrices multiply in training; auto: that of the run, never coarser than bf16.
    int8: a fifth less time on CPUs with AVX512-VNNI and without AMX, by our C++ kernels; torch.compile is then not used.
    fp8: less time and memory from about 20 layers on, on GPUs since Ada and Hopper; not in RL.
    With int8 and fp8 a step learns a little less"""
    samples: Free[Rare[int]] = 4
    """replies to held-out prompts to keep at each measurement, as the page /runs shows them; 0: none"""

    def corpus(self, inherited: str) -> str:
        """Return the corpus that --data names, or without --data `inherited`, the parent's corpus.

        The conversations of corpora that nanochat can make or download need no texts of them. Any
        other corpus must be here, and a path becomes its name, by which later stages find it from
        any folder. Raises UserError (exit code 2) as resolve_data() does.
        """
        if self.data is None:
            return inherited
        if {*unweighted(self.data).split(",")} <= {"tinyworld", *SOURCES}:
            return self.data
        data = resolve_data(self.data)
        return data.name if len(data.corpora) == 1 else self.data

    def own_tag(self, parent_tag: str, file: str | None) -> str:
        """Return the tag of this stage's checkpoints: --out_tag, or else one based on `parent_tag`.

        The name of the user's `file`, if any, is added to the parent's tag, so that a model that
        learns from the file does not replace the one that learned from the corpus.
        """
        return named_after(parent_tag, file) if self.out_tag is None else self.out_tag


@dataclass(frozen=True)
class CoreFlags:
    """When a model is measured on tasks while it trains."""

    core_every: Free[int | Auto] = "auto"
    """steps between measurements of CORE, or in chat stages of ChatCORE, on the same problems each time; 0: never.
    auto: as often as costs 1 % of the run's FLOPs, and never where the tasks' data is not here"""
    core_examples: Free[Rare[int]] = 100
    """problems of each task for core_every; chat stages ask an eighth of them.
    With other problems the curve of a resumed run jumps"""


@dataclass(frozen=True)
class ShapeFlags:
    """The shape of the model.

    Every size left at auto is chosen to suit the corpus and the device, and is printed.
    """

    depth: int = 20
    """number of layers, the one dial of size: every size that is not given follows from it"""
    model_dim: int | Auto = "auto"
    """number of channels; auto: 64 x depth, rounded up to whole heads"""
    head_dim: int | Auto = "auto"
    """channels per head; auto: 128, or 64 below eight layers"""
    max_seq_len: int | Auto = "auto"
    """context length in tokens; auto: 2,048, on a CPU 512, for TinyWorld 256"""
    window_pattern: str = WINDOWS
    """attention windows, tiled over the layers: L sees the whole context, S a quarter of it. A Qwen3 has L only"""
    bigram_rows: int | Auto = "auto"
    """rows of a table of embeddings that pairs of neighbouring tokens share by a hash, which cost no FLOPs; 0: none;
    auto: 32 for each entry of the vocabulary, at most 131,072; none for TinyWorld;
    none where the text is read more than twice. A Qwen3 has none"""
    offset_layers: int | Auto = "auto"
    """number of layers, from the first, that take half of each key from the token before; auto: all; 0: none.
    Such a layer finds what followed the same token earlier, so models learn in fewer steps to repeat and to continue.
    A Qwen3 has none"""
    exclusive_layers: Rare[int | Auto] = "auto"
    """number of layers, from the first, whose attention loses its component along each token's own value; auto: all;
    0: none. What is left tells more about the context (exclusive self attention, arXiv 2603.09078). A Qwen3 has none"""
    matmul: Matmul = "auto"
    """number format in which the large matrices multiply in training; auto: that of the run, never coarser than bf16.
    fp8: less time and memory from about 20 layers on, on GPUs since Ada and Hopper.
    int8: a fifth less time on CPUs with AVX512-VNNI and without AMX, by our C++ kernels; torch.compile is then not used.
    With fp8 and int8 a step learns a little less. A Qwen3 takes neither"""
    family: Family = "gpt"
    """kind of model; qwen3: Qwen3's shape, which transformers, vLLM and llama.cpp load after nanochat.export"""


@dataclass(frozen=True)
class BatchFlags:
    """The flags that split a step, for scripts that train on rows of tokens."""

    total_batch_size: int | Auto = "auto"
    """tokens per step over all devices; auto: chosen by the length of the run and the corpus"""
    device_batch_size: Free[int | Auto] = "auto"
    """rows per pass on one device, at most; auto: as many as its memory holds.
    Lower it when memory runs out: what is learned stays the same"""
    gradient_accumulation_steps: Free[int | None] = None
    """passes per step; normally left out, since it follows from total_batch_size and device_batch_size"""

    @property
    def smaller_steps(self) -> str:
        """The advice against too few steps."""
        return tr("a smaller --total_batch_size")


@dataclass(frozen=True)
class ScheduleFlags:
    """The flags for the length of pretraining, and the course of its learning rate."""

    num_iterations: int | None = None
    """number of steps; overrides target_flops and target_param_data_ratio"""
    target_flops: Rare[float | None] = None
    """train for this many FLOPs; overrides target_param_data_ratio"""
    target_param_data_ratio: float = 12.0
    """train on this many tokens per parameter of the matrices and the head"""
    warmup_steps: Rare[int | None] = None
    """steps over which the learning rate rises; default: 40, or a twentieth of a short run"""
    warmdown_ratio: float = 0.65
    """fraction of the run, at its end, over which the learning rate falls"""
    final_lr_frac: Rare[float] = 0.05
    """learning rate at the end, as a fraction of its peak"""

    def tokens(self, flops_per_token: int, scaling_parameters: int) -> float:
        """Return the tokens of the whole run, to which an automatic total_batch_size is fitted.

        If num_iterations is given, they are those of the same run without it.
        """
        if self.target_flops is not None:
            return self.target_flops / flops_per_token
        return self.target_param_data_ratio * scaling_parameters

    def steps(self, flops_per_token: int, scaling_parameters: int, tokens_per_step: int) -> int:
        """Return the number of steps that the flags ask for, and log the reason for it."""
        if self.num_iterations is not None:
            steps = self.num_iterations
            reason = tr("given")
        elif self.target_flops is not None:
            steps = schedule.steps_for_flops(self.target_flops, flops_per_token, tokens_per_step)
            reason = tr(
                "{target_flops:.3g} FLOPs at {flops_per_token:,} a token",
                target_flops=self.target_flops,
                flops_per_token=flops_per_token,
            )
        else:
            ratio = self.target_param_data_ratio
            steps = schedule.steps_for_ratio(ratio, scaling_parameters, tokens_per_step)
            reason = tr("{ratio:g} tokens per scaling parameter", ratio=ratio)
        log(
            tr(
                "horizon: {steps:,} steps, {tokens:,} tokens ({reason})",
                steps=steps,
                tokens=steps * tokens_per_step,
                reason=reason,
            )
        )
        return steps


@dataclass(frozen=True)
class Epochs:
    """The flags for the length of a stage, given as passes over its data or as steps."""

    num_epochs: float = 1.0
    """passes over the training data"""
    num_iterations: int | None = None
    """number of steps; overrides num_epochs"""

    def steps(self, items: int, items_per_step: int, smaller_steps: str) -> int:
        """Return the number of steps that the flags ask for.

        If the number follows from num_epochs and is below 20 (FEW_STEPS), too few to learn much,
        warn, and advise more epochs or, if a step has several items, `smaller_steps`, such as "a
        smaller --total_batch_size".
        """
        if self.num_iterations is not None:
            return self.num_iterations
        steps = max(int(self.num_epochs * items) // items_per_step, 1)
        if steps < FEW_STEPS:
            enough = f"--num_epochs={-(-2 * FEW_STEPS * items_per_step // items)}"
            advice = enough
            if items_per_step > 1:
                advice = tr(
                    "{smaller_steps}, or {enough}", smaller_steps=smaller_steps, enough=enough
                )
            warn(
                tr(
                    "the data is {items:,} rows, which makes {steps} step(s) of "
                    "{rows_per_step}: too few to learn much. Give {advice}",
                    items=items,
                    steps=steps,
                    rows_per_step=items_per_step,
                    advice=advice,
                )
            )
        return steps

    def steps_over(
        self, count: int, row_tokens: int, rows_per_step: int, name: str, smaller_steps: str
    ) -> int:
        """Return the number of steps over `count` rows of data, and log it with the data's name.

        steps() describes `smaller_steps`.
        """
        steps = self.steps(count, rows_per_step, smaller_steps)
        log(
            tr(
                "data: {name}, {count:,} rows of {row_tokens} tokens; {steps:,} steps",
                name=name,
                count=count,
                row_tokens=row_tokens,
                steps=steps,
            )
        )
        return steps


@dataclass(frozen=True)
class TuningEpochs:
    """The flags for the length of fine-tuning."""

    num_epochs: float | Auto = "auto"
    """passes over the training data; auto: 8 for up to 300 conversations, fewer for more, 1 from 2,400 on.
    Models with fewer than 576 channels take up to three times as many"""
    num_iterations: int | None = None
    """number of steps; overrides num_epochs"""

    def resolved(self, conversations: int, width: int) -> Epochs:
        """Return the flags without "auto".

        The data has `conversations` conversations or pairs, and the model `width` channels.
        """
        if self.num_epochs != "auto":
            return Epochs(self.num_epochs, self.num_iterations)
        epochs = tuning_rules.tuning_epochs(conversations, width)
        if self.num_iterations is None:
            log(
                tr(
                    "num_epochs: {epochs:.3g} (for {conversations:,} conversations and "
                    "{width:,} channels)",
                    epochs=epochs,
                    conversations=conversations,
                    width=width,
                )
            )
        return Epochs(epochs, self.num_iterations)


@dataclass(frozen=True)
class ExampleFlags:
    """The flags that split a step, for scripts that train on answers."""

    target_examples_per_step: int | Auto = 32
    """rows per step over all devices; a row holds several whole conversations.
    auto: 32, or fewer where the data makes fewer than 30 such steps, but at least 4 conversations"""
    device_batch_size: Free[int | Auto] = "auto"
    """rows per pass on one device, at most; auto: as many as its memory holds.
    Lower it when memory runs out: what is learned stays the same"""

    @property
    def smaller_steps(self) -> str:
        """The advice against too few steps."""
        return tr("a smaller --target_examples_per_step")


@dataclass(frozen=True)
class ChatFlags:
    """The flags for the data of a stage that learns from conversations."""

    conversations: str | None = None
    """file, folder or pattern of your own conversations, used instead of the corpus's mixture.
    Files are JSONL, JSON, CSV or parquet"""
    mix: str | None = None
    """the same, added to the corpus's mixture.
    They are repeated until one conversation in ten is yours"""
    skip_bad_lines: Rare[bool] = False
    """leave out the lines of your file that cannot be used, and say how many they are.
    By default such a file is refused"""
    documents_every: int | Auto = "auto"
    """take every n-th row from the base corpus, and train all of its tokens, so that the model does not forget it;
    0: none. auto: for TinyWorld 4 in midtraining, and 8 in fine-tuning on its own conversations; else 0"""
    documents: str | None = None
    """corpus of these rows: a name, a folder of your own, or a mixture such as web:0.7,books:0.3.
    Default: the corpus of the stage"""

    @property
    def own_file(self) -> str | None:
        """The file with the user's own conversations, or None if there is none."""
        return self.conversations or self.mix

    def documents_of(self, auto: int) -> int:
        """Return the value of --documents_every, or `auto` if it was left at auto.

        Raises UserError (exit code 2) if --documents names a corpus from which no row would be
        taken.
        """
        every = auto if self.documents_every == "auto" else self.documents_every
        if self.documents is not None and not every:
            raise UserError(
                tr(
                    "--documents needs --documents_every=N, N of at least 1, since else it "
                    "gives no rows, got --documents={documents} and "
                    "--documents_every={documents_every}: give --documents_every=8, or "
                    "leave --documents out",
                    documents=self.documents,
                    documents_every=self.documents_every,
                ),
                exit_code=2,
            )
        return every

    def with_documents(
        self, rows: Source, corpus: str, auto: int, tokenizer: Tokenizer, seed: int
    ) -> tuple[Source, str]:
        """Return `rows` with rows of documents mixed in, and a phrase for the log that says so.

        One row in N comes from --documents, or else from `corpus`; N is --documents_every, or
        `auto` if that was left at auto. If N is 0, return `rows` unchanged and an empty phrase.
        Raises UserError (exit code 2) if N is 1, and as documents_of() does.
        """
        every = self.documents_of(auto)
        if not every:
            return rows, ""
        data = resolve_data(self.documents or corpus)
        documents = split_rows(data, tokenizer, "train", rows.row_tokens - 1, seed)
        phrase = tr(" and one row in {every} of {corpus}", every=every, corpus=data.name)
        return blend(rows, documents, every), phrase


def named_after(tag: str, file: str | None) -> str:
    """Return `tag` with the name of a file appended, without its extension, such as d4-mychats.

    The tag is returned unchanged if it already ends with that name, or if there is no file.
    """
    if file is None:
        return tag
    name = re.sub(r"[^\w.-]+", "-", name_of(file)).strip("-.")
    return tag if tag.endswith(f"-{name}") else f"{tag}-{name}"
