"""Trains one model on random tokens in a process of its own. Only bench.finetune starts this file.

The first argument is the task as JSON. The process prints a line when it is ready, and then answers each line of its
input, a number of steps, with a line of JSON: the CPU seconds and the loss of each step, and the peak memory.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Tensor], float]  # inputs and targets, int64 (B, T) each -> loss in nats
RATE, ALPHA = 1e-4, 16.0


def ours(task: dict[str, Any]) -> tuple[Step, int]:
    """A step with the calls that scripts.finetune makes. Nothing of ours is imported on the other side."""
    from bench.finetune.ours import Tuned
    from nanochat import device
    from nanochat.models.qwen.config import QwenConfig

    tuned = Tuned(
        QwenConfig(**task["shape"]), task["rank"], task["targets"], device.compute_init("cpu")
    )
    tuned.model.checkpoints = task["checkpoints"]
    if task["compile"]:
        tuned.compile(task["rows"], task["tokens"])
    return lambda inputs, targets: tuned.step([(inputs, targets)]), tuned.parameters


def transformers(task: dict[str, Any]) -> tuple[Step, int]:
    """A step as transformers' Trainer takes it: the model in the compute format, peft's adapters, fused AdamW."""
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

        about = peft.LoraConfig(
            r=task["rank"], lora_alpha=ALPHA, target_modules=task["targets"], task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(model, about)
        if task["checkpoints"]:
            model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, weight_decay=0.0, fused=True)
    model.train()

    def step(inputs: Tensor, targets: Tensor) -> float:
        rows = torch.cat((inputs, targets[:, -1:]), dim=1)  # transformers shifts the labels
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step, sum(p.numel() for p in model.parameters())


def main() -> None:
    """Make the side, warm it up, and answer requests until the input ends; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(42)
    step, parameters = (transformers if task["side"] == "transformers" else ours)(task)
    generator = torch.Generator().manual_seed(7)
    size = (task["rows"], task["tokens"] + 1)

    def take(steps: int) -> dict[str, Any]:
        seconds, losses = [], []
        for _ in range(steps):
            cells = torch.randint(task["shape"]["vocab_size"], size, generator=generator)
            start = time.process_time()
            losses.append(step(cells[:, :-1].contiguous(), cells[:, 1:].contiguous()))
            seconds.append(time.process_time() - start)
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"seconds": seconds, "losses": losses, "peak_bytes": peak}

    def reply(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    reply({**take(1), "parameters": parameters})
    for line in sys.stdin:
        reply(take(int(line)))


if __name__ == "__main__":
    main()
