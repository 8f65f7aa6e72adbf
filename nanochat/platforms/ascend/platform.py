"""Huawei Ascend NPUs: detects the chip, chooses its operators, and prepares its collectives."""

import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nanochat.common import UserError, log, tr, warn
from nanochat.platforms.ascend import environment, errors, kernels
from nanochat.platforms.ascend.chips import CHIPS, AscendChip, called, chip_of
from nanochat.platforms.ascend.environment import PortBlocks
from nanochat.platforms.ascend.kernels import KINDS, NEEDS, AscendPlain
from nanochat.platforms.ascend.operators import ATTENTION, AscendListed, try_operators
from nanochat.platforms.ascend.profiler import AscendTracer
from nanochat.platforms.base import Platform, Tracer
from nanochat.platforms.operations import KernelChoice, Operations


class Ascend(Platform):
    """An Ascend NPU. Call unavailable() first, because that imports torch_npu."""

    name = "npu"
    backend = "hccl"

    def __init__(self, index: int = 0):
        super().__init__(index)
        self.ports = PortBlocks()  # reserves ports for this job's collectives

    def unavailable(self) -> str:
        """Import torch_npu, and return why it cannot be used here, or "" if it can.

        torch_npu's environment variables are set first. Any failure of the import, such as a
        missing CANN or a wrong version, is returned as the reason rather than raised.
        """
        if importlib.util.find_spec("torch_npu") is None:
            return tr("torch_npu is not installed")
        try:
            version = metadata.version("torch_npu")
        except metadata.PackageNotFoundError:  # built from source, so assume torch's own version
            version = torch.__version__
        why = environment.prepare_loading(version)
        if why:
            return tr("torch_npu could not be loaded: {why}", why=why)
        try:
            is_usable = importlib.import_module("torch_npu").npu.is_available()
        except Exception as failure:  # a foreign library may raise anything
            why = errors.cannot_load(str(failure) or repr(failure))
            return tr("torch_npu could not be loaded: {why}", why=why)
        if is_usable:
            return ""
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        if visible is not None:
            return tr(
                "torch_npu loaded, but sees no NPU with ASCEND_RT_VISIBLE_DEVICES={visible}",
                visible=visible,
            )
        return tr("torch_npu loaded, but sees no NPU")

    def idle_cards(self) -> str:
        """Return advice if this host has NPUs that cannot be used, or "" otherwise."""
        file = environment.card_file()
        if not file:
            return ""
        why = self.unavailable()
        if not why:
            return ""
        return tr(
            "this host has NPUs ({file}), but they cannot be used: {why}. Type source setup_ascend.sh, then "
            "python check_npu.py. To use the CPU instead, set NANOCHAT_DEVICE=cpu or give --device_type=cpu.",
            file=file,
            why=why,
        )

    @cached_property
    def chip(self) -> AscendChip:
        """The chip, identified by its SoC version.

        What the table of chips does not contain comes from torch_npu and the device.
        """
        soc = int(self.module.get_soc_version())
        chip = chip_of(soc) or self._unknown_chip(soc)
        if chip.memory_gib:
            return chip
        _, total = self.module.mem_get_info()
        return replace(chip, memory_gib=total / 2**30)

    def _unknown_chip(self, soc: int) -> AscendChip:
        return AscendChip(
            f"SoC {soc}",
            socs=(soc,),
            bf16=bool(self.module.is_bf16_supported()),
            kernels="listed",
            tflops=0,
            source="not known",
            memory_gib=0,
            saturates=not self.module.utils.is_support_inf_nan(),
        )

    def chips(self) -> Sequence[AscendChip]:
        """Return all chips with a known peak, which the planner can plan for on any host."""
        return [chip for chip in CHIPS if chip.tflops]

    def chips_called(self, name: str) -> Sequence[AscendChip]:
        """Return the chips that a name of torch_npu, npu-smi or a purchase order may mean."""
        return called(name)

    def best_dtype(self) -> tuple[torch.dtype, str]:
        """Return bf16 if the chip supports it, or else fp16, and why."""
        if self.chip.bf16:
            return torch.bfloat16, tr("the NPU has bf16")
        if self.chip.trains:
            return torch.float16, tr("the NPU has no bf16; a gradient scaler is used")
        return torch.float16, tr("the NPU has no bf16; for inference only")

    def lacks_dtype(self, dtype: torch.dtype) -> str:
        """Return why the chip cannot compute in bf16, or "" if it can or `dtype` is not bf16."""
        if dtype != torch.bfloat16 or self.chip.bf16:
            return ""
        return tr("bfloat16 was asked for, but this NPU has no bf16; leave it out to use float16")

    def slow_dtype(self, dtype: torch.dtype) -> str:
        """Return a warning that a chip of the first generation has no float32 matrix products."""
        if dtype != torch.float32 or not self.chip.saturates:
            return ""
        return tr(
            "a {chip} multiplies float32 matrices in float16, by CANN's default, and without a loss "
            "scale; float16, which has one, is faster and loses no more",
            chip=self.chip.name,
        )

    def open(self) -> torch.device:
        """Implement Platform.open, and choose where kernels come from."""
        device = super().open()
        environment.use_ready_kernels(self.module)
        return device

    def cannot_open(self, failure: str) -> str:
        """Return a message that says why the card cannot be opened, and what may help."""
        return errors.cannot_open(self.index, failure)

    def in_use(self, free: int, total: int) -> str:
        """Return a warning if less than 80 % of the card's memory is free, or "" otherwise."""
        return errors.in_use(self.index, free, total)

    # --- ranks -----------------------------------------------------------------------------------

    def prepare_collectives(self) -> int:
        """Implement Platform.prepare_collectives with HCCL's environment variables."""
        return environment.prepare_collectives()

    def ranks_met(self, rank: int, local_rank: int, world_size: int) -> None:
        """Reserve ports on each host for the collectives of a job with several ranks.

        Local rank 0 reserves the block at HCCL_IF_BASE_PORT. If the variable is not set, local rank
        0 reserves a free block, if any, and all ranks of the host set the variable to the block's
        start. Raises UserError if the user's block is taken, or if the chip's collectives cannot
        join the cards of this host.
        """
        if world_size == 1:
            return
        self._check_group(int(os.environ.get("LOCAL_WORLD_SIZE") or world_size))
        requested_port = os.environ.get("HCCL_IF_BASE_PORT")
        if requested_port:
            if local_rank == 0 and requested_port.isdigit():
                self._hold_ports(int(requested_port))
            return
        blocks = torch.zeros(world_size, dtype=torch.int64)
        if local_rank == 0:
            blocks[rank] = self.ports.free(hold=True)
        dist.all_reduce(blocks)
        base = int(blocks[rank - local_rank])
        if base:
            os.environ["HCCL_IF_BASE_PORT"] = str(base)

    def _check_group(self, ranks: int) -> None:
        """Raise UserError or warn if collectives do not join the first `ranks` visible cards."""
        group = self.chip.group
        if not group or ranks == 1:
            return
        joined = [count for count in (1, 2, 4, 8) if count <= ranks]
        if ranks not in joined:
            raise UserError(
                tr(
                    "the collectives of a {chip} join 1, 2, 4 or 8 cards of a host, not {ranks}: "
                    "start {fewer} processes, with NPROC_PER_NODE={fewer} or torchrun "
                    "--nproc_per_node={fewer}",
                    chip=self.chip.name,
                    ranks=ranks,
                    fewer=joined[-1],
                ),
                exit_code=2,
            )
        setting = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
        cards = [int(word) for word in setting.split(",") if word.strip().isdigit()][:ranks]
        if ranks <= group and len({card // group for card in cards}) > 1:
            warn(
                tr(
                    "the collectives of a {chip} join 2 or 4 cards only if all are among 0 to 3 or "
                    "among 4 to 7, but ASCEND_RT_VISIBLE_DEVICES={setting}",
                    chip=self.chip.name,
                    setting=setting,
                )
            )

    def _hold_ports(self, base: int) -> None:
        taken_port = self.ports.hold(base)
        if taken_port:
            raise UserError(environment.block_words(base, taken_port))

    # --- work ------------------------------------------------------------------------------------

    def operations(self, choice: KernelChoice) -> Operations:
        """Return the chip's operators, or torch's own if `choice` is plain, and log which.

        On a chip that is not in the table, the fused operators are tested first. Raises UserError
        if fused kernels were requested and the chip has no fused attention for training, or if
        torch_npu lacks an operator that the chip computes with.
        """
        chip = self.chip
        if choice == "plain":
            log(tr("kernels: plain"))
            return AscendPlain(stacks_matrices=False, saturates=chip.saturates)
        operators = NEEDS.get(chip.kernels, chip.operators)
        if chip_of(chip.socs[0]) is None:
            log(
                tr(
                    "{name} is not in the table of chips, so its operators are tried (--kernels "
                    "plain uses none)",
                    name=chip.name,
                )
            )
            dtype, _ = self.best_dtype()
            operators = try_operators(torch.device(self.name, self.index), dtype)
        if choice == "fused" and ATTENTION not in operators:
            raise UserError(
                tr(
                    "--kernels fused was asked for, but a {chip} has no fused attention for training; use auto",
                    chip=chip.name,
                )
            )
        missing_operators = kernels.missing(operators)
        if missing_operators:
            raise UserError(
                tr(
                    "torch_npu lacks {missing_operators}, which a {name} computes with; install "
                    "one that fits CANN (python check_npu.py), or give --kernels plain",
                    missing_operators=", ".join(missing_operators),
                    name=chip.name,
                )
            )
        names = f" ({', '.join(operators)})" if operators else ""
        log(tr("kernels: {kernels}{names}", kernels=chip.kernels, names=names))
        if chip.kernels == "listed":
            return AscendListed(operators, saturates=chip.saturates)
        return KINDS[chip.kernels](saturates=chip.saturates)

    def cannot_train(self) -> str:
        """Return why an inference card cannot train, or "" for a card that can."""
        if self.chip.trains:
            return ""
        return tr(
            "a {chip} is for inference only, it cannot train: its operators have no backward pass. "
            "Train on another device (--device_type=cpu is one); chat_cli, chat_web and chat_eval work here.",
            chip=self.chip.name,
        )

    def clear_overflow(self) -> None:
        """Clear the overflow flag of a chip that saturates."""
        if self.chip.saturates:
            self.module.amp.GradScaler.clear_npu_overflow_flag()

    def overflows(self) -> list[torch.Tensor]:
        """Return a list with the chip's overflow flag, or an empty list if overflows give inf.

        The flag is read as torch_npu's GradScaler reads it.
        """
        if not self.chip.saturates:
            return []
        device = torch.device(self.name, self.index)
        status = torch.zeros(8, dtype=torch.float32, device=device)
        import torch_npu  # pyright: ignore[reportMissingImports]

        return [torch_npu.npu_get_float_status(status)[:1]]

    def explain(self, failure: RuntimeError) -> str:
        """Implement Platform.explain for errors of torch_npu, HCCL and the driver."""
        return errors.explain(str(failure)) or super().explain(failure)

    def tracer(self, folder: Path, name: str, steps: int) -> Tracer:
        """Return a tracer that uses torch_npu's profiler."""
        return AscendTracer(folder, name, steps)

    def peak_flops(self) -> tuple[float, str] | None:
        """Return the chip's dense peak FLOP/s and its source, or None if no peak is known."""
        chip = self.chip
        if not chip.tflops:
            return None
        words = {
            "data sheet": tr("data sheet"),
            "estimate": tr("estimate"),
            "estimate from cores and clock": tr("estimate from cores and clock"),
            "one die": tr("one die"),
        }
        source = ", ".join(words.get(word, word) for word in chip.source.split(", "))
        return chip.tflops * 1e12, tr("{chip}, {source} dense", chip=chip.name, source=source)

    def graphs_missing(self) -> str:
        """Return why graphs cannot be captured, or "" if they can.

        The chip, torch_npu and the variable TASK_QUEUE_ENABLE must all allow capturing.
        """
        if self.chip is not None and self.chip.kernels != "fused":
            return tr(
                "a {chip} captures no graphs; the second generation (910B, 910C) does",
                chip=self.chip.name,
            )
        if not hasattr(self.module, "make_graphed_callables"):
            return tr("this torch_npu has no make_graphed_callables; install a newer one")
        # torch's own attention also calls it if it exists.
        if kernels.missing(("npu_fusion_attention_v3",)):
            return tr(
                "the attention of this torch_npu cannot be captured; 2.7.1.post4, 2.8.0.post4, 2.9.0.post2 and "
                "2.10.0 are the first releases with npu_fusion_attention_v3, for CANN 9.0"
            )
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            return tr(
                "TASK_QUEUE_ENABLE is 2, with which nothing can be captured; export TASK_QUEUE_ENABLE=1"
            )
        return ""

    def new_graph(self) -> Any:
        """Return an empty torch_npu graph."""
        return self.module.NPUGraph()

    def compiler_missing(self) -> str:
        """Return why torch.compile cannot be used: it is off on NPUs."""
        return tr("off on NPUs")
