"""A run that computes right has the golden losses; one with any mistake does not, and hears where it left them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat import dataloader, schedule
from nanochat.attention import PlainAttention
from nanochat.common import UserError
from nanochat.data.tinyworld import world
from nanochat.gpt import GPT
from nanochat.linear import Linear
from nanochat.report import __main__ as report_command
from nanochat.report import check, golden
from nanochat.report.golden import Golden, Goldens, Trained, Verdict, compare, golden_of, load, read_run
from nanochat.tokenizer import Tokenizer, tokenizer_dir
from scripts import base_train
from tests.support.flags import configured
from tests.support.tiny_model import on_cpu

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = golden.FEWEST_STEPS
SMOKE = load().runs["smoke"]

# --- the comparison --------------------------------------------------------------------------------


def a_golden(**changes: Any) -> Golden:
    settings = {"corpus": "tinyworld", "family": "gpt", "depth": 2, "max_seq_len": 256, "num_iterations": 20,
                "total_batch_size": 2048, "seed": 42, "tokenizer": "12ab"}  # fmt: skip
    losses = tuple(7 - step / 10 for step in range(12))
    about = {"vocabulary": 1024, "flags": (), "settings": settings, "grad_norms": (0.5, 0.5), "losses": losses}
    tolerances = {"float32": 1e-4, "bfloat16": 1e-2}
    return Golden("smoke", **about | {"tolerances": tolerances, "gradient_tolerances": tolerances} | changes)


GOLDENS = Goldens({"smoke": a_golden()}, 2)


def a_run(off: dict[int, float | None], number_format: str = "float32", device: str = "cpu",
          grad_norms: tuple[float, float] = (0.5, 0.5), **settings: Any) -> Trained:  # fmt: skip
    """The golden run again, with differences added to the losses of some steps."""
    same = a_golden()
    metrics = []
    for step, loss in enumerate(same.losses, 1):
        difference = off.get(step, 0.0)
        metrics.append(
            {"step": step, "loss": None if difference is None else loss + difference, "grad_norm": grad_norms[step > 1]}
        )
    return Trained({**same.settings, **settings}, number_format, device, metrics)


def judged(run: Trained) -> Verdict:
    return compare(run, golden_of(run, GOLDENS), GOLDENS)


def test_the_first_step_beyond_the_tolerance_is_named() -> None:
    assert judged(a_run({3: 9e-5, 7: -9e-5})).right
    verdict = judged(a_run({3: 9e-5, 7: -2e-4, 9: 0.5}))
    assert not verdict.right and verdict.first_wrong == 7 and verdict.worst_step == 9
    assert verdict.expected == pytest.approx(6.4) and verdict.loss == pytest.approx(6.4 - 2e-4)
    assert judged(a_run({5: None})).first_wrong == 5  # a loss that is not a number


@pytest.mark.parametrize(("run", "right"), [
    (a_run({4: 9e-3}, "bfloat16"), True),
    (a_run({4: 9e-3}, "float32"), False),
    (a_run({4: 1.9e-4}, device="npu"), True),  # the predicted tolerance is twice as wide
    (a_run({4: 2.1e-4}, device="npu"), False),
])  # fmt: skip
def test_the_tolerance_is_that_of_number_format_and_device(run: Trained, right: bool) -> None:
    assert judged(run).right is right


def test_another_setting_is_a_cause_even_where_the_losses_agree() -> None:
    verdict = judged(a_run({}, seed=43, tokenizer="34cd"))
    assert not verdict.right and verdict.is_other and len(verdict.causes) == 2
    assert not judged(a_run({4: 0.5})).is_other


def test_the_first_gradient_tells_data_from_passes_and_optimizer() -> None:
    causes = [
        judged(run).causes
        for run in (
            a_run({4: 0.5}),
            a_run({2: 0.5}, grad_norms=(0.5, 0.6)),
            a_run({4: 0.5}, grad_norms=(0.5, 0.6)),
            a_run({4: 0.5}, grad_norms=(0.6, 0.6)),
        )
    ]
    assert causes[0] == causes[1] == causes[2] != causes[3]
    rounded = judged(a_run({4: 5e-3})).causes
    assert "bfloat16" in rounded[0]
    assert not [cause for cause in judged(a_run({4: 1.5e-2}, "bfloat16")).causes if "rounded as" in cause]


def test_few_losses_in_a_coarse_format_are_no_proof() -> None:
    assert "a sharper check" in check.report(judged(a_run({}, "bfloat16")))
    assert "a sharper check" not in check.report(judged(a_run({})))
    assert len(load().default.losses) >= golden.ENOUGH_STEPS


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    for run in (a_run({}, depth=3), a_run({}, "float16"), replace(a_run({}), metrics=a_run({}).metrics[:9])):
        with pytest.raises(UserError) as refusal:
            judged(run)
        assert refusal.value.exit_code == 2
    with pytest.raises(UserError):
        read_run(tmp_path)
    (tmp_path / "step_000020").mkdir()
    (tmp_path / "step_000020" / "meta.json").write_text('{"config": {}}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 7.0}\n')
    with pytest.raises(UserError, match="number format"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="--golden must be one of smoke"):
        check.check(None, "huge")


def test_the_preset_of_speedrun_is_the_golden_run() -> None:
    speedrun = (ROOT / "speedrun.sh").read_text(encoding="utf-8")
    for run in load().runs.values():
        if run.name.startswith(("smoke", "speedrun")):
            for flag in run.flags:
                _, _, value = flag.partition("=")
                assert flag in speedrun or value in speedrun, f"speedrun.sh does not have {flag}"


# --- real runs -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base folder with TinyWorld and the tokenizer of the golden run smoke."""
    base = tmp_path_factory.mktemp("golden")
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DEVICE": "cpu"}
    for _, command in check.commands(SMOKE)[:2]:
        subprocess.run([sys.executable, "-m", *command], env=environment, check=True, stdout=subprocess.DEVNULL)
    return base


@pytest.fixture
def trained(world_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that trains the first steps of the golden run in this process, and returns the verdict."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(world_folder))

    def run(dtype: torch.dtype = torch.float32, plain: bool = False, **flags: Any) -> Verdict:
        words = dict(flag.removeprefix("--").split("=") for flag in SMOKE.flags)
        values = {name: int(word) if word.isdigit() else word for name, word in words.items()}
        fixed = {"model_tag": "judged", "stop_at": STEPS, "eval_every": 0, "samples": 0, "compile": False}
        cfg = configured(base_train.Config, **{**values, **fixed, "data": "tinyworld", "resume": "none", **flags})
        compute = replace(on_cpu(), dtype=dtype)
        if plain:
            compute = replace(compute, operations=compute.platform.operations("plain"))
        with compute.ending:
            base_train.train(cfg, compute)
        done = read_run(world_folder / "base_checkpoints" / "judged")
        return compare(done, golden_of(done, load()), load())

    yield run


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_run_passes(trained: Any, dtype: torch.dtype) -> None:
    verdict = trained(dtype, device_batch_size=4)
    assert verdict.right, check.report(verdict)
    assert not verdict.predicted


def wrong_rate(patch: pytest.MonkeyPatch) -> None:
    right = schedule.rate_scale
    patch.setattr(schedule, "rate_scale", lambda tokens: 1.1 * right(tokens))


def no_mask(patch: pytest.MonkeyPatch) -> None:
    def sees_the_future(self: PlainAttention, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)

    patch.setattr(PlainAttention, "causal", sees_the_future)


def short_mask(patch: pytest.MonkeyPatch) -> None:
    right = PlainAttention.attend

    def sees_too_little(self: PlainAttention, q: Tensor, k: Tensor, v: Tensor, window: int, scale: float | None = None,
                        ) -> Tensor:  # fmt: skip
        return right(self, q, k, v, min(window, 192), scale)

    patch.setattr(PlainAttention, "attend", sees_too_little)


def in_bf16(patch: pytest.MonkeyPatch) -> None:
    def rounded(self: Linear, input: Tensor) -> Tensor:
        return F.linear(input.bfloat16(), self.weight.bfloat16()).to(input.dtype)

    patch.setattr(Linear, "forward", rounded)


def other_parameters(patch: pytest.MonkeyPatch) -> None:
    right = GPT.init_weights
    patch.setattr(GPT, "init_weights", lambda self, seed: right(self, seed + 1))


def other_order(patch: pytest.MonkeyPatch) -> None:
    right = dataloader.split_rows
    patch.setattr(dataloader, "split_rows", lambda *words: right(*words[:4], *(seed + 1 for seed in words[4:])))


MISTAKES = {  # and a word of the likely cause
    wrong_rate: "learning rates",
    no_mask: "attention mask",
    short_mask: "attention mask",
    in_bf16: "bfloat16",
    other_parameters: "seed",
    other_order: "seed",
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_run_with_a_mistake_fails(trained: Any, monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    mistake(monkeypatch)
    verdict = trained(plain=True)
    assert verdict.first_wrong is not None, check.report(verdict)
    assert any(MISTAKES[mistake] in cause for cause in verdict.causes), check.report(verdict)


@pytest.mark.slow
def test_another_seed_and_a_stale_tokenizer_are_named(trained: Any, world_folder: Path) -> None:
    verdict = trained(seed=43)
    assert verdict.first_wrong is not None and verdict.causes == (
        "the setting seed: 43 in this run, 42 in the golden run",
    )
    folder = tokenizer_dir("tinyworld")
    current = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    try:
        some = (text for i, text in enumerate(world.documents(0, copies=1)) if i < 500)
        Tokenizer.train(some, SMOKE.vocabulary).save(folder)
        verdict = trained()
    finally:
        for path, content in current.items():
            path.write_bytes(content)
    assert verdict.first_wrong is not None
    assert [cause for cause in verdict.causes if "tokenizer" in cause]


@pytest.mark.slow
def test_the_command_judges_a_machine_and_a_run(world_folder: Path, monkeypatch: pytest.MonkeyPatch,
                                                capfd: pytest.CaptureFixture[str]) -> None:  # fmt: skip
    def in_the_world(*_: Any, **__: Any) -> Any:
        return contextlib.nullcontext(str(world_folder))

    monkeypatch.setattr(check.tempfile, "TemporaryDirectory", in_the_world)
    monkeypatch.setenv("NANOCHAT_DEVICE", "cpu")
    monkeypatch.setenv("NANOCHAT_DTYPE", "float32")
    report_command.main(report_command.Config("check", golden="smoke"))
    assert "this computes right" in capfd.readouterr().out
    folder = world_folder / "base_checkpoints" / SMOKE.name
    report_command.main(report_command.Config("check", (str(folder),)))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": 5', '"loss": 6'))
    with pytest.raises(UserError, match="NOT") as refusal:
        report_command.main(report_command.Config("check", (str(folder),)))
    assert refusal.value.exit_code == 1


@pytest.mark.slow
@pytest.mark.npu
def test_an_emulated_npu_passes_within_the_predicted_tolerance(world_folder: Path) -> None:
    command = check.commands(SMOKE)[2][1]
    command = [word for word in command if not word.startswith(("--model_tag", "--stop_at"))]
    emulator = ["-m", "tests.emulated_npu", "--chip", "910B3", "--devices", "1", "--", sys.executable, "-m"]
    flags = ["--model_tag=npu", f"--stop_at={STEPS}"]
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(world_folder)}
    environment.pop("NANOCHAT_DEVICE", None)
    subprocess.run([sys.executable, *emulator, *command, *flags], env=environment, cwd=ROOT, check=True)
    run = read_run(world_folder / "base_checkpoints" / "npu")
    assert run.device_kind == "npu" and run.number_format == "bfloat16"
    verdict = compare(run, golden_of(run, load()), load())
    assert verdict.right and verdict.predicted, check.report(verdict)
