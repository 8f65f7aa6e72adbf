"""Fine-tunes one model on random tokens in a process of its own, for bench.finetune.

It answers each request, a number of steps, as child.time_steps does.
"""

import math
from collections.abc import Callable
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from bench import child
from bench.batches import random_passes

Step = Callable[[Tensor, Tensor], float]  # inputs and targets, int64 (B, T) each -> loss in nats
RATE = 1e-4
ALPHA = 16


def shape_of(task: dict[str, Any]) -> Any:  # a QwenConfig
    """Return the shape of the model that is fine-tuned."""
    from nanochat.models.llama import LlamaConfig
    from nanochat.models.qwen.config import QwenConfig

    kind = LlamaConfig if task["published"]["model_type"] == "llama" else QwenConfig
    return kind(**task["shape"])


def ours(task: dict[str, Any]) -> tuple[Step, int]:
    """Return a step with the calls that scripts.finetune makes, and the number of parameters."""
    from bench.training import Trainer, random_model
    from nanochat import dataloader, device
    from nanochat.checkpoint_manager.families import cast_matrices
    from nanochat.context import Packed
    from nanochat.models.lora import LoraConfig, add_adapters, init_adapters
    from nanochat.optim import OneRate

    compute = device.compute_init("cpu")
    model = random_model(shape_of(task), compute)
    if task["rank"]:
        cast_matrices(model, compute.dtype)
        adapters = LoraConfig(task["rank"], ALPHA)
        add_adapters(model, adapters)
        init_adapters(model)
    rates = OneRate(RATE)
    trainer = Trainer(model, compute, rates)
    model.train()

    def one_pass(module: torch.nn.Module) -> Tensor:
        zeros = torch.zeros(task["batch"], dtype=torch.long)
        context = Packed(zeros)
        loss: Tensor = module(zeros, zeros, reduction="sum", context=context)
        return loss

    def step(inputs: Tensor, targets: Tensor) -> float:
        documents = torch.zeros_like(inputs)  # each row is one document
        passes = [(inputs, targets, documents)]
        num_targets = targets.numel()
        data = dataloader.Step(0, num_targets, passes, ("documents",))
        return trainer.update(data)

    if task["compile"]:
        trainer.compile(*task["batch"], one_pass=one_pass)
    return step, trainer.parameters


def transformers(task: dict[str, Any]) -> tuple[Step, int]:
    """Return a step as transformers' Trainer makes it: peft's adapters, fused AdamW."""
    import transformers as library

    library.logging.set_verbosity_error()
    dtype = getattr(torch, task["dtype"])
    config = library.AutoConfig.for_model(**task["published"])
    model: Any = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.config.use_cache = False
    if task["rank"]:
        import peft

        from nanochat.models.lora import LoraConfig

        adapter = peft.LoraConfig(
            r=task["rank"],
            lora_alpha=ALPHA,
            target_modules=list(LoraConfig.targets),
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, adapter)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    model.train()

    def step(inputs: Tensor, targets: Tensor) -> float:
        last = targets[:, -1:]
        rows = torch.cat((inputs, last), dim=1)  # transformers shifts the labels
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return step, parameters


def matmuls(task: dict[str, Any]) -> tuple[Step, int]:
    """Return a step that only multiplies, with as many products as a step of ours needs."""
    from bench.finetune.matmuls import multiplier
    from nanochat.models.lora import LoraConfig, add_adapters
    from nanochat.models.qwen.model import Qwen

    with torch.device("meta"):
        model = Qwen(shape_of(task))
    if task["rank"]:
        add_adapters(model, LoraConfig(task["rank"], ALPHA))
    multiply = multiplier(model, task["batch"], getattr(torch, task["dtype"]))

    def step(inputs: Tensor, targets: Tensor) -> float:
        multiply()
        return math.nan

    parameters = sum(parameter.numel() for parameter in model.parameters())
    return step, parameters


def main() -> None:
    """Make the side, warm it up, and answer requests until the input ends."""
    answer = child.answers()
    task = child.task()
    torch.set_num_threads(1)
    torch.manual_seed(42)
    sides = {"ours": ours, "transformers": transformers, "matmuls": matmuls}
    make = sides[task["side"]]
    step, parameters = make(task)
    vocab_size = task["shape"]["vocab_size"]
    rows, tokens = task["batch"]
    batches = (random_passes(vocab_size, 1, rows, tokens, seed)[0] for seed in count())
    warmup = child.time_steps(step, islice(batches, 1))
    answer({"parameters": parameters, "losses": warmup["losses"]})
    for steps in child.requests():
        answer(child.time_steps(step, islice(batches, steps)))


if __name__ == "__main__":
    main()
