"""RL on published and fine-tuned models: adapters and every parameter, rewarded by functions, stopped and resumed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError
from nanochat.runtime.tracking import read_metrics
from scripts import chat_rl, finetune
from tests.support.flags import configured
from tests.support.qwens import oracle, write_folder
from tests.support.tiny_model import on_cpu

IDX = torch.arange(40).view(2, 20)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model, problems, a reward that a random model can raise, and conversations to fine-tune on."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "qwen3").mkdir()
    write_folder(folder / "qwen3", "qwen3")
    problems = [json.dumps({"question": f"Say {i}.", "answer": i}) for i in range(20)]
    (folder / "numbers.jsonl").write_text("\n".join(problems))
    (folder / "rewards.py").write_text(
        "def spaces(reply): return sum(c in ' etaoin' for c in reply) / max(len(reply), 1)\n"
    )
    chats = [json.dumps({"prompt": f"Say {i}.", "response": f"{i} cats"}) for i in range(20)]
    (folder / "chats.jsonl").write_text("\n".join(chats))
    return folder


def run(files: Path, **changes: Any) -> None:
    flags = {"model": files / "qwen3", "problems": str(files / "numbers.jsonl"), "out_tag": "made", "compile": None,
             "reward": (f"{files}/rewards.py:spaces",), "examples_per_step": 4, "num_samples": 4, "max_new_tokens": 8,
             "overlong_tokens": 1, "num_iterations": 4, "learning_rate": 1e-2, "eval_every": 0, "kl": 0.01,
             "trees": False, "samples": 1}  # fmt: skip
    chat_rl.train(configured(chat_rl.Config, **{**flags, **changes}), on_cpu())


def figures(name: str) -> list[float]:
    return [line[name] for line in read_metrics(checkpoint_dir("rl", "made")) if name in line]


@pytest.mark.slow
def test_an_adapter_learns_what_a_function_rewards(files: Path) -> None:
    run(files, num_iterations=10, examples_per_step=8, advantage="normalized", learning_rate=2e-2, trees=True)
    rewards = figures("reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.05, rewards
    divergence = figures("kl")
    assert divergence[0] == pytest.approx(0, abs=1e-6)  # an adapter that changes nothing yet
    assert divergence[-1] > 1e-3
    assert max(figures("sampler_gap")) < 1e-3
    assert len(figures("held_out_reward")) == 2


@pytest.mark.slow
def test_peft_reads_the_adapter(files: Path) -> None:
    import peft

    run(files)
    loaded = load_model("rl", "made", None, on_cpu())
    assert loaded.from_folder
    published = load_qwen(files / "qwen3", on_cpu())
    in_peft = peft.PeftModel.from_pretrained(oracle(published), checkpoint_dir("rl", "made") / "step_000004")
    with torch.no_grad():
        ours = loaded.model(IDX)
        torch.testing.assert_close(in_peft(IDX).logits, ours, rtol=1e-4, atol=1e-4)
        assert (ours - published(IDX)).abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("rank", [4, 0])
def test_a_run_that_was_stopped_ends_with_the_same_bits(files: Path, base_folder: Path, rank: int) -> None:
    def weights() -> bytes:
        name = "adapter_model.safetensors" if rank else "model.safetensors"
        return (checkpoint_dir("rl", "made") / "step_000004" / name).read_bytes()

    flags = {"lora_rank": rank, "loss": "ppo", "updates_per_rollout": 2, "learning_rate": 1e-3}
    run(files, **flags)
    straight = weights()
    shutil.rmtree(base_folder)
    run(files, **flags, stop_at=2)
    torch.manual_seed(99)
    run(files, **flags)
    assert weights() == straight


@pytest.mark.slow
@pytest.mark.parametrize(("tuned_rank", "rank"), [(4, "auto"), (4, 0), (0, "auto"), (0, 0)])
def test_rl_begins_with_what_was_tuned(files: Path, tuned_rank: int, rank: int | str) -> None:
    flags = {"model": files / "qwen3", "data": (str(files / "chats.jsonl"),), "out_tag": "tuned", "num_iterations": 4,
             "learning_rate": 1e-2, "lora_rank": tuned_rank, "replay_every": 0, "compile": False, "max_length": 64}  # fmt: skip
    if tuned_rank:
        flags["lora_dropout"] = 0.1
    finetune.train(configured(finetune.Config, **flags), on_cpu())
    run(files, model=None, source="tune", lora_rank=rank, learning_rate=0.0, num_iterations=1)
    after = load_model("rl", "made", None, on_cpu())
    with torch.no_grad():
        tuned = load_model("tune", "tuned", None, on_cpu()).model(IDX)
        torch.testing.assert_close(after.model(IDX), tuned, rtol=1e-4, atol=1e-4)
        assert (tuned - load_qwen(files / "qwen3", on_cpu())(IDX)).abs().max() > 1e-2
    assert ("lora" in after.meta) == (rank != 0)
    if tuned_rank and rank:
        assert after.meta["lora"]["rank"] == tuned_rank


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model": None}, "--lora_rank, --lora_alpha and --learning_rate are for published models"),
        (
            {"model": None, "learning_rate": "auto", "lora_alpha": 8.0},
            "--lora_rank, --lora_alpha and --learning_rate are",
        ),
        (
            {"lora_rank": 0, "lora_alpha": 8.0},
            "--lora_alpha shapes an adapter, and --lora_rank=0 trains every parameter",
        ),
        ({"source": "tune"}, "--model names a published model"),
        ({"model_tag": "d4"}, "--model names a published model"),
        ({"matmul": "int8"}, "--matmul=int8 is for models that were pretrained here"),
        ({"init_lr_frac": 0.1}, "--init_lr_frac and the rates of roles are for models that were pretrained here"),
        ({"matrix_lr": 0.1}, "--init_lr_frac and the rates of roles are for models that were pretrained here"),
        ({"model": None, "source": "tune"}, "no checkpoint of stage tune"),
    ],
)
def test_flags_that_name_no_one_model_are_refused(files: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        run(files, **flags)
    assert refused.value.exit_code == 2
