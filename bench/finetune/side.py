"""Fine-tunes one model on random tokens in a process of its own. Only bench.finetune starts this file.

It answers each request, a number of steps, with the CPU seconds and the loss of each step, and the peak memory.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import child

Step = Callable[[Tensor, Tensor], float]  # inputs and targets, int64 (B, T) each -> loss in nats
RATE, ALPHA = 1e-4, 16.0


def ours(task: dict[str, Any]) -> tuple[Step, int]:
    """Return a step with the calls that scripts.finetune makes, and the number of parameters."""
    from bench.training import Trainer, random_model, update
    from nanochat import dataloader, device
    from nanochat.checkpoint_manager.families import cast_matrices
    from nanochat.context import Packed
    from nanochat.models.lora import LoraConfig, add_adapters, init_adapters
    from nanochat.models.qwen.config import QwenConfig
    from nanochat.optim import OneRate

    compute = device.compute_init("cpu")
    model = random_model(QwenConfig(**task["shape"]), compute)
    if task["rank"]:
        cast_matrices(model, compute.dtype)
        add_adapters(model, LoraConfig(task["rank"], ALPHA, targets=tuple(task["targets"])))
        init_adapters(model)
    model.checkpoints = task["checkpoints"]
    trainer = Trainer(model, compute, OneRate(RATE))
    model.train()

    def documents(inputs: Tensor, targets: Tensor) -> dataloader.Step:
        """Return a pass of packed rows, each one document."""
        numbers = torch.zeros_like(inputs)
        return dataloader.Step(
            0,
            targets.numel(),
            [(inputs, targets, numbers)],
            ("documents",),
        )

    def one_pass(module: torch.nn.Module) -> Tensor:
        zeros = torch.zeros((task["rows"], task["tokens"]), dtype=torch.long)
        loss: Tensor = module(zeros, zeros, reduction="sum", context=Packed(zeros))
        return loss

    def step(inputs: Tensor, targets: Tensor) -> float:
        work = documents(inputs, targets)
        outcome = update(
            trainer.passes,
            trainer.optimizers,
            work,
            trainer.safeguards,
            compute,
        )
        return outcome.loss

    if task["compile"]:
        trainer.compile(task["rows"], task["tokens"], one_pass=one_pass)
    return step, trainer.parameters


def transformers(task: dict[str, Any]) -> tuple[Step, int]:
    """Return a step as transformers' Trainer makes it: the compute format, peft's adapters, fused AdamW."""
    import transformers as library

    library.logging.set_verbosity_error()
    dtype = getattr(torch, task["dtype"])
    config = library.AutoConfig.for_model(**task["published"])
    model: Any = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    if task["checkpoints"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if task["rank"]:
        import peft

        adapter = peft.LoraConfig(
            r=task["rank"],
            lora_alpha=ALPHA,
            target_modules=task["targets"],
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, adapter)
        if task["checkpoints"]:
            model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=RATE,
        weight_decay=0.0,
        fused=True,
    )
    model.train()

    def step(inputs: Tensor, targets: Tensor) -> float:
        rows = torch.cat((inputs, targets[:, -1:]), dim=1)  # transformers shifts the labels
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Make the side, warm it up, and answer requests until the input ends."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    torch.manual_seed(42)
    make = {"ours": ours, "transformers": transformers}[task["side"]]
    step, parameters = make(task)
    generator = torch.Generator().manual_seed(7)

    def steps(count: int) -> dict[str, Any]:
        seconds, losses = [], []
        size = (task["rows"], task["tokens"] + 1)
        for _ in range(count):
            cells = torch.randint(task["shape"]["vocab_size"], size, generator=generator)
            inputs, targets = cells[:, :-1].contiguous(), cells[:, 1:].contiguous()
            start = time.process_time()
            losses.append(step(inputs, targets))
            seconds.append(time.process_time() - start)
        return {
            "seconds": seconds,
            "losses": losses,
            "peak_bytes": child.peak_bytes(),
        }

    answer({"parameters": parameters, "losses": steps(1)["losses"]})
    for count in child.requests():
        answer(steps(count))


if __name__ == "__main__":
    main()
