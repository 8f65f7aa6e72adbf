"""Chooses values for sizes that are left at `auto`: the shape of a model, and the split of a step.

The choices follow from the depth, the corpus, the device and its memory. Before the first step,
this module also checks or reports what a run needs: memory, disk, time and passes over its data.
"""

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from nanochat import device, schedule
from nanochat.checkpoint_manager import files
from nanochat.checkpoint_manager.families import on_meta
from nanochat.checkpoint_manager.resume import Start
from nanochat.common import UserError, log, required_appendix, tr, warn
from nanochat.data.mixing import Data
from nanochat.data.traits import traits
from nanochat.dataloader import Rows, Source
from nanochat.device import Compute
from nanochat.gpt import GPTConfig
from nanochat.model import ModelConfig
from nanochat.platforms.operations import Matmul
from nanochat.prepare.interleave import MixedRows
from nanochat.runtime import parallel
from nanochat.runtime.progress import amount, duration
from nanochat.train import tuning_rules
from nanochat.train.fit import disk
from nanochat.train.fit.memory import reachable
from nanochat.train.flags import WINDOWS, Auto, BatchFlags, ExampleFlags, Family, ShapeFlags

Shape = TypeVar("Shape", bound=ModelConfig)

STATE_BYTES = 12  # at least, per parameter: an fp32 master weight, its gradient and one moment
# Reading a text more often than this teaches little (Muennighoff et al. 2023, arXiv:2305.16264).
MANY_EPOCHS = 4
GPT_ONLY = ("bigram_rows", "offset_layers", "exclusive_layers")  # sizes that a Qwen3 lacks
PAIRS = 32  # rows in the table of bigrams for each token of the vocabulary
MOST_PAIRS = 2**17  # the largest number of rows in the table of bigrams
# If a text is read more often than this, a model memorizes its bigrams (dev/LOG.md).
EPOCHS_WITH_PAIRS = 2
# Held for the backward pass per token, channel and layer, from counting a layer's tensors.
ACTIVATION_BYTES = 44


def model_config(
    flags: ShapeFlags,
    vocab_size: int,
    corpus: str,
    compute: Compute,
    begun_shape: Mapping[str, int] | None = None,
) -> ModelConfig:
    """Return the configuration of a model, choosing all sizes that are "auto".

    If a run resumes, `begun_shape` has the sizes of its model. Two of them are kept if their flag is
    "auto": the context, which would depend on the device, and the number of layers with exclusive
    attention, which is 0 in models of earlier versions.
    If `bigram_rows` is "auto", a GPT gets a bigram table unless it would teach little about the
    corpus; keep_bigrams() later removes it if the text is read too often. A Qwen3's MLP has 8/3
    times as many channels as the model, so that its layers have about as many parameters as a
    GPT's. Raises UserError if the sizes are invalid or do not fit together.
    """
    for name in ("depth", "model_dim", "head_dim", "max_seq_len"):
        size = getattr(flags, name)
        if size != "auto" and size < 1:
            raise UserError(
                tr("{flag} must be at least 1, got {size}", flag=name, size=size), exit_code=2
            )
    if flags.bigram_rows != "auto" and flags.bigram_rows < 0:
        raise UserError(
            tr("bigram_rows must be at least 0, got {bigram_rows}", bigram_rows=flags.bigram_rows),
            exit_code=2,
        )
    depth = flags.depth
    # 128 channels per head suit matrix units best, but models with fewer than eight layers would
    # have too few heads.
    head_dim = _chosen(flags.head_dim, 128 if depth >= 8 else 64)
    model_dim = _chosen(flags.model_dim, -(-depth * 64 // head_dim) * head_dim)
    if model_dim % head_dim:
        raise UserError(
            tr(
                "model_dim must be a multiple of head_dim, got {model_dim} and {head_dim}",
                model_dim=model_dim,
                head_dim=head_dim,
            ),
            exit_code=2,
        )
    length = flags.max_seq_len
    begun = begun_shape or {}
    if length == "auto" and "sequence_len" in begun:
        length = begun["sequence_len"]
        log(tr("max_seq_len: {length} (as the run began)", length=length))
    elif length == "auto":
        length = _row_tokens(corpus, compute)
    if flags.family == "qwen3":
        qwen = _qwen()
        gpt_only = {name: getattr(flags, name) for name in GPT_ONLY}
        qwen.check_flags(gpt_only, flags.window_pattern, WINDOWS)
        return qwen.shape_of(depth, model_dim, head_dim, length, vocab_size)
    pairs = table_rows(flags.bigram_rows, vocab_size)
    if flags.bigram_rows == "auto" and not traits(corpus).pairs:
        pairs = 0
        log(tr("bigram_rows: 0 (they teach little about {corpus})", corpus=corpus))
    heads = model_dim // head_dim
    return GPTConfig(
        sequence_len=length,
        vocab_size=vocab_size,
        n_layer=depth,
        n_head=heads,
        n_kv_head=heads,
        n_embd=model_dim,
        window_pattern=flags.window_pattern,
        bigram_rows=pairs,
        offset_layers=_chosen(flags.offset_layers, depth),
        exclusive_layers=_chosen(
            flags.exclusive_layers, begun.get("exclusive_layers", 0) if begun else depth
        ),
    )


def _chosen(size: int | Auto, automatic: int) -> int:
    return automatic if size == "auto" else size


def _row_tokens(corpus: str, compute: Compute) -> int:
    """Return the context length that suits the corpus, or else the device, and log it."""
    length = traits(corpus).row_tokens
    why = tr("the documents of {corpus} are short", corpus=corpus)
    if length is None:
        length, why = compute.platform.context
    log(tr("max_seq_len: {length} ({why})", length=length, why=why))
    return length


def _qwen() -> Any:
    """Return the module for pretraining a Qwen3; raise UserError (exit code 2) if it is missing."""
    return required_appendix("nanochat.models.qwen.pretraining", "--family qwen3")


def advise(kind: Family, pattern: str) -> None:
    """Log advice on the tokenizer's split pattern if it limits the use of a model of this kind."""
    if kind == "qwen3":
        _qwen().advise(pattern)


@dataclass(frozen=True)
class ModelSize:
    """The parameter counts of a model, and its FLOPs per token."""

    parameters: int
    scaling_parameters: int  # those of matrices and head, which scaling laws count
    flops_per_token: int


def model_size(shape: ModelConfig, compute: Compute, matmul: Matmul) -> ModelSize:
    """Return the size of a model of this shape without allocating its parameters.

    Raises UserError (exit code 2) if the device or the model cannot train in the number format
    `matmul`.
    """
    model = on_meta(shape, compute)
    compute.platform.use_matmul(model, matmul, compute.operations)
    counts = model.parameter_counts()
    return ModelSize(counts["total"], counts["scaling"], model.flops_per_token())


def table_rows(requested: int | Auto, vocab_size: int) -> int:
    """Return the number of rows in the bigram table; "auto" derives it from the vocabulary."""
    if requested != "auto":
        return requested
    return min(PAIRS * vocab_size, MOST_PAIRS)


def keep_bigrams(shape: Shape, requested: int | Auto, epochs: float) -> Shape:
    """Return the shape of a model, without its bigram table if `epochs` is more than two.

    If `requested` is not "auto", the shape is returned unchanged.
    """
    if requested != "auto" or not isinstance(shape, GPTConfig) or not shape.bigram_rows:
        return shape
    rows = shape.bigram_rows if epochs <= EPOCHS_WITH_PAIRS else 0
    log(
        tr("bigram_rows: {rows:,} (the text is read {epochs:,.2f} times)", rows=rows, epochs=epochs)
    )
    return replace(shape, bigram_rows=rows)


def check_fits(depth: int, parameters: int, mode: parallel.Sharding, compute: Compute) -> None:
    """Raise UserError if parameters, gradients and one moment per parameter exceed free memory.

    The exit code is 2 if they exceed even the total memory.
    """
    _, shards = parallel.mesh_shape(mode, compute)
    ranks_in_one_memory = parallel.ranks_in_memory(compute)
    needed = STATE_BYTES * parameters / shards * ranks_in_one_memory
    total = device.memory_total(compute)
    free = reachable(compute)
    if free < needed <= total:
        raise UserError(
            tr(
                "training takes at least {needed:,.1f} GiB of each device, but only {free:,.1f} "
                "of {total:,.1f} GiB are "
                "free: other processes hold the rest. End them, or choose another device.",
                needed=needed / 2**30,
                free=free / 2**30,
                total=total / 2**30,
            )
        )
    if needed > total:
        figures = {
            "depth": depth,
            "parameters": parameters,
            "needed": needed / 2**30,
            "total": total / 2**30,
        }
        if not compute.platform.has_own_memory:
            text = tr(
                "depth {depth} makes {parameters:,} parameters, which take at least "
                "{needed:,.0f} GiB to train; "
                "this host has {total:,.0f} GiB. Take a smaller --depth or --model_dim.",
                **figures,
            )
        else:
            text = tr(
                "depth {depth} makes {parameters:,} parameters, which take at least "
                "{needed:,.0f} GiB to train; "
                "a device has {total:,.0f} GiB. Take a smaller --depth or --model_dim, or more "
                "devices with "
                "--shard=full (now {mode}).",
                mode=mode,
                **figures,
            )
        raise UserError(text, exit_code=2)


def check_disk(
    folder: Path, parameters: int, checkpoint: float, keep: int, resume: Start = "auto"
) -> None:
    """Raise UserError if the disk of a folder has no room for another checkpoint, or not for two.

    `checkpoint` is the number of bytes in a checkpoint's tensors. Log a warning if the disk cannot
    hold the `keep` newest checkpoints and one more, unless `keep` is 0, which keeps all. Of the
    checkpoints in the folder, those count as held that a run with --resume=`resume` will replace;
    it moves later ones aside, where they stay.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free + sum(map(_size_of, folder.glob(".*step_*")))
    continued = files.steps(folder)
    if resume != "auto":
        first = 0 if resume == "none" else resume
        continued = [step for step in continued if step <= first]
    saved = sum(_size_of(files.step_dir(folder, step)) for step in continued)
    # the newest checkpoint is complete before the oldest is deleted
    kept_at_once = keep + 1 if keep else 2
    one = disk.of_checkpoints(checkpoint)
    needed = disk.of_checkpoints(checkpoint, kept_at_once)
    least = max(one, 2 * one - saved)
    if free < least:
        raise UserError(
            tr(
                "a checkpoint of {parameters:,} parameters takes up to {size}, and a new one is "
                "complete before an old one is deleted, so that {least} must be free, but {folder} "
                "has {free} free. Free some space, or set NANOCHAT_BASE_DIR to a folder on another "
                "disk.",
                parameters=parameters,
                size=amount(one, "B"),
                least=amount(least, "B"),
                folder=folder,
                free=amount(free, "B"),
            )
        )
    if free < needed - saved:
        warn(
            tr(
                "the checkpoints will take up to {size}, but {folder} has {free} free: free some "
                "space, or lower "
                "--keep",
                size=amount(needed, "B"),
                folder=folder,
                free=amount(free, "B"),
            )
        )


def _size_of(folder: Path) -> int:
    """Return the total size of a folder's files in bytes."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has renamed it
            if path.is_file():
                size += path.stat().st_size
    return size


def warn_of_time(seconds: float, stage: str, compute: Compute) -> None:
    """Warn if a run of a stage on a CPU will take longer than an hour, and say how to shorten it."""
    if seconds <= compute.platform.long_run_seconds:
        return
    text = tr(
        "this run will take a CPU about {time}. You can stop at any time and resume with the same "
        "command. For a shorter run give --num_iterations",
        time=duration(seconds),
    )
    if stage == "base":  # the only stage that chooses the size of the model
        text += tr(
            ", or a smaller --depth, --max_seq_len and --total_batch_size; docs/data.md has an "
            "example for a laptop"
        )
    warn(text)


def tell_epochs(corpus: str, rows: int, row_tokens: int, steps: int, rows_per_step: int) -> None:
    """Log how many times a run reads its rows, and warn if more than four times (MANY_EPOCHS)."""
    epochs = steps * rows_per_step / rows
    log(
        tr(
            "data: {corpus}, {rows:,} rows of {row_tokens} tokens, {epochs:,.2f} epochs",
            corpus=corpus,
            rows=rows,
            row_tokens=row_tokens,
            epochs=epochs,
        )
    )
    if epochs > MANY_EPOCHS:
        enough = max(MANY_EPOCHS * rows // rows_per_step, 1)
        warn(
            tr(
                "the run reads all of its data {epochs:,.0f} times; from about {many} times on, "
                "a model learns the "
                "texts by heart instead of learning from them. Add texts, or give "
                "--num_iterations={enough}",
                epochs=epochs,
                many=MANY_EPOCHS,
                enough=enough,
            )
        )


def mixture_table(data: Data, rows: Source, rows_read: int) -> list[dict[str, Any]]:
    """Return a table for the report: how much of each corpus is in the first `rows_read` rows.

    It has a dict for each corpus of a mixture, and is empty if `rows` is not a mixture.
    """
    if not isinstance(rows, MixedRows):
        return []
    table = []
    total_shares = sum(data.shares)
    counts = rows.rows_before(rows_read)
    corpora = zip(data.corpora, data.shares, rows.sources, counts, strict=True)
    for corpus, share, source, count in corpora:
        table.append(
            {
                "corpus": corpus.name,
                "share": f"{100 * share / total_shares:.4g} %",
                "rows": source.size,
                "rows read": count,
                "epochs": count / source.count,
            }
        )
    return table


def tell_mixture(table: Sequence[Mapping[str, Any]]) -> None:
    """Log how much a run reads of each corpus in a table that mixture_table() returned."""
    for corpus_figures in table:
        log(
            tr(
                "  {corpus}: {share} of the rows, {rows_read:,}, {epochs:.2f} epochs",
                corpus=corpus_figures["corpus"],
                share=corpus_figures["share"],
                rows_read=corpus_figures["rows read"],
                epochs=corpus_figures["epochs"],
            )
        )


def check_for_ranks(flag: str, per_step: int, compute: Compute) -> None:
    """Raise UserError (exit code 2) if ranks cannot share `per_step` rows or problems equally."""
    ranks = compute.world_size
    if per_step % ranks:
        fitting = max(per_step // ranks, 1) * ranks
        raise UserError(
            tr(
                "{flag} must be a multiple of the {ranks} ranks, got {per_step}. Take "
                "--{flag}={fitting}.",
                flag=flag,
                ranks=ranks,
                per_step=per_step,
                fitting=fitting,
            ),
            exit_code=2,
        )


@dataclass(frozen=True)
class Batch:
    """The split of a training step into passes, in tokens and rows."""

    tokens_per_step: int
    rows_per_step: int
    device_batch_size: int  # rows per pass on one rank
    passes: int
    probe: bool = False  # whether probe.fit() may replace device_batch_size


def batch(
    flags: BatchFlags,
    shape: ModelConfig,
    parameters: int,
    corpus: str,
    compute: Compute,
    tokens: float | None = None,
    begun_rows: int | None = None,
) -> Batch:
    """Return the split of a step into passes, choosing sizes that are "auto", and log it.

    `tokens` is the expected number of tokens in a pretraining, or None in a later stage. A given
    number of passes determines an automatic device_batch_size, and must agree with a
    given one. If a run resumes, `begun_rows` is the number of rows in each earlier step, which an
    automatic total_batch_size keeps. Raises UserError (exit code 2) if the numbers are invalid or
    disagree, or if the ranks cannot share a step equally.
    """
    requested_passes = flags.gradient_accumulation_steps
    length = shape.sequence_len
    unit = length * compute.world_size
    total = flags.total_batch_size
    if total == "auto" and begun_rows is not None:
        total = _as_begun(begun_rows, compute) * length
        log(tr("total_batch_size: {total:,} tokens a step (as the run began)", total=total))
    elif total == "auto":
        fitting, why = _step_tokens(corpus, tokens)
        total = schedule.shared_tokens(fitting, unit)
        log(tr("total_batch_size: {total:,} tokens a step ({why})", total=total, why=why))
    rows = flags.device_batch_size
    if rows == "auto" and requested_passes is not None:
        rows = max(total // (unit * max(requested_passes, 1)), 1)
    elif rows == "auto":
        rows, why = _device_rows(shape, parameters, compute)
        log(tr("device_batch_size: at most {rows} rows a pass ({why})", rows=rows, why=why))
    per_pass, passes = schedule.micro_batches(total, length, rows, compute.world_size)
    if flags.device_batch_size != "auto" and per_pass < rows:
        log(
            tr(
                "device_batch_size: lowered from {rows} to {per_pass}, a divisor of each "
                "rank's rows of a step",
                rows=rows,
                per_pass=per_pass,
            )
        )
    product = tr(
        "{total:,} tokens = {passes} pass(es) x {per_pass} rows x {length:,} tokens x "
        "{ranks} rank(s)",
        total=total,
        passes=passes,
        per_pass=per_pass,
        length=length,
        ranks=compute.world_size,
    )
    if requested_passes is not None and passes != requested_passes:
        raise UserError(
            _other_passes(requested_passes, total, per_pass, unit, product), exit_code=2
        )
    log(tr("step: {product}", product=product))
    is_open = flags.device_batch_size == "auto" and requested_passes is None
    probe = is_open and compute.platform.pass_tokens is None  # on a CPU, more rows are no faster
    return Batch(total, total // length, per_pass, passes, probe)


def _step_tokens(corpus: str, tokens: float | None) -> tuple[int, str]:
    """Return a number of tokens per step that suits the corpus or the run, and the reason for it.

    If no number is set for the corpus, the result follows from `tokens`, the number of tokens in
    the whole run, or is the default if that is None.
    """
    of_corpus = traits(corpus).step_tokens
    if of_corpus is not None:
        return of_corpus, tr("{corpus} is small", corpus=corpus)
    if tokens is None:
        return schedule.REFERENCE_BATCH, tr("the default")
    reference = 12.0 * schedule.REFERENCE_SCALING_PARAMETERS
    return schedule.batch_tokens(tokens, reference), tr("for {tokens:,.0f} tokens", tokens=tokens)


def _as_begun(rows: int, compute: Compute) -> int:
    """Return `rows`, the number of rows per step with which the resumed run began.

    Raises UserError (exit code 2) if the ranks cannot share the rows equally.
    """
    if rows % compute.world_size:
        fits = ", ".join(str(ranks) for ranks in range(1, rows + 1) if rows % ranks == 0)
        raise UserError(
            tr(
                "a step of this run has {rows} rows, which {ranks} devices cannot share equally. "
                "Resume on a number of "
                "devices that divides {rows} ({fits}), or give --resume=none to start again, "
                "which moves the "
                "checkpoints aside.",
                rows=rows,
                ranks=compute.world_size,
                fits=fits,
            ),
            exit_code=2,
        )
    return rows


def example_batch(
    flags: ExampleFlags,
    shape: ModelConfig,
    parameters: int,
    rows: Rows,
    corpus: str,
    compute: Compute,
    begun_rows: int | None = None,
) -> Batch:
    """Return the split of a step, whose number of rows the flags give, into passes, and log it.

    If that number is "auto", a resumed run keeps its `begun_rows` per step, and the number for a new
    run follows from the `rows` of its data. Raises UserError (exit code 2) if the numbers are
    invalid, or if the ranks cannot share the rows equally.
    """
    examples = flags.target_examples_per_step
    if examples == "auto":
        if begun_rows is not None:
            examples = _as_begun(begun_rows, compute)
            why = tr("as the run began")
        else:
            fitting = tuning_rules.tuning_step_rows(rows.count, rows.conversations)
            examples = -(-fitting // compute.world_size) * compute.world_size
            why = tr(
                "for {conversations:,} conversations in {rows:,} rows of {row_tokens:,} tokens",
                conversations=rows.conversations,
                rows=rows.count,
                row_tokens=shape.sequence_len,
            )
        log(
            tr(
                "target_examples_per_step: {examples} rows a step ({why})",
                examples=examples,
                why=why,
            )
        )
    check_for_ranks("target_examples_per_step", examples, compute)
    split = BatchFlags(examples * shape.sequence_len, flags.device_batch_size)
    return batch(split, shape, parameters, corpus, compute)


def _other_passes(passes: int, total: int, per_pass: int, unit: int, product: str) -> str:
    """Return the error message for a number of `passes` that does not fit a step, with advice."""
    advice = tr("Leave it out.")
    if passes > 0:
        rows = total / (unit * passes)
        flag = f"--total_batch_size={passes * per_pass * unit}"
        if rows == int(rows):
            flag = f"--device_batch_size={rows:.0f}"
        advice = tr("Leave it out, or take {flag}.", flag=flag)
    fitting = total // (per_pass * unit)
    return tr(
        "gradient_accumulation_steps must be {total:,} / ({per_pass} x {unit:,}) = "
        "{fitting}, since a step of {product}; got {passes}. {advice}",
        total=total,
        per_pass=per_pass,
        unit=unit,
        fitting=fitting,
        product=product,
        passes=passes,
        advice=advice,
    )


def _device_rows(shape: ModelConfig, parameters: int, compute: Compute) -> tuple[int, str]:
    """Return the number of rows per pass that suits the device, at least 1, and the reason for it.

    On a CPU, a pass should fit into the caches. On other devices, it should fit into memory
    together with 16 bytes per parameter.
    """
    pass_tokens = compute.platform.pass_tokens
    if pass_tokens:
        rows = max(pass_tokens // shape.sequence_len, 1)
        return rows, tr(
            "{pass_tokens:,} tokens a pass suit {device}",
            pass_tokens=pass_tokens,
            device=compute.platform.context[1],
        )
    memory = device.memory_total(compute)
    return rows_that_fit(memory, shape, parameters), tr(
        "{memory:.0f} GiB of memory", memory=memory / 2**30
    )


def memory_of(rows: int, shape: ModelConfig, parameters: int, shards: int = 1) -> float:
    """Return the bytes that training takes on one device with passes of `rows` rows.

    The estimate covers activations and, per parameter, an fp32 master weight, a gradient and two
    moments. With several shards, a device holds its share of the master weights and moments and,
    between passes, the whole gradient and a copy of the weights to compute with.
    """
    state_bytes = 16 if shards == 1 else 6 + 12 / shards
    channels = shape.n_layer * shape.n_embd * shape.sequence_len
    return state_bytes * parameters + ACTIVATION_BYTES * channels * rows


def rows_that_fit(memory: float, shape: ModelConfig, parameters: int) -> int:
    """Return the largest number of rows per pass, a power of two, that fits into `memory` bytes.

    The rows must fit into 80 % of the memory together with master weights, gradients and optimizer
    state. The result is at least 1, even if one row does not fit.
    """
    state = memory_of(0, shape, parameters)
    of_row = memory_of(1, shape, parameters) - state
    rows = max(int((0.8 * memory - state) // of_row), 1)
    return 2 ** (rows.bit_length() - 1)
