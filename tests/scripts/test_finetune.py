"""Fine-tuning published models: adapters and every parameter, on one rank and two, stopped and resumed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanochat import device
from nanochat.checkpoint_manager.files import read_meta
from nanochat.checkpoint_manager.huggingface.adapter import merge_adapter, read_adapter
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.checkpoint_manager.same_run import RunSettings
from nanochat.common import UserError
from nanochat.context import Packed
from nanochat.device import Compute
from nanochat.runtime.tracking import read_metrics
from nanochat.train import compile as compiling
from nanochat.train import replay
from nanochat.train.chat_rows import chat_rows
from scripts import finetune
from tasks.mixtures import own_conversations
from tests.support.flags import configured
from tests.support.qwens import VOCABULARY, write_folder
from tests.support.ranks import Pool
from tests.support.small_world import few_own_words
from tests.support.tiny_model import on_cpu

WORDS = ("the", "cat", "sat", "on", "mat", "12", "34", "猫", "坐", "垫子")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Published models of two families, a file of conversations, and a file of preferences, where short answers win."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3", "qwen3.5", "llama3", "qwen3-moe"):
        (folder / family).mkdir()
        write_folder(folder / family, family)
    chats, pairs = [], []
    for i in range(150):
        words = [WORDS[(i * k) % len(WORDS)] for k in range(1, 3 + i % 9)]
        messages = [{"role": "user", "content": " ".join(words)}, {"role": "assistant", "content": words[0]}]
        chats.append(json.dumps({"messages": messages}))
        pair = {"prompt": " ".join(words), "chosen": words[0], "rejected": " ".join(words[::-1])}
        pairs.append(json.dumps(pair))
    (folder / "chats.jsonl").write_text("\n".join(chats[:120]))
    (folder / "pairs.jsonl").write_text("\n".join(pairs))
    return folder


def test_a_run_of_every_parameter_that_was_stopped_ends_with_the_same_bits(models: Path, base_folder: Path) -> None:
    flags = {"family": "qwen3-moe", "lora_rank": 0, "checkpoint_activations": True}
    finetune.train(config(models, **flags), on_cpu())
    file = checkpoint_dir("tune", "made") / "step_000004" / "model.safetensors"
    straight = file.read_bytes()
    shutil.rmtree(base_folder)
    finetune.train(config(models, **flags, stop_at=2), on_cpu())
    torch.manual_seed(99)
    finetune.train(config(models, **flags), on_cpu())
    assert file.read_bytes() == straight


@pytest.fixture(autouse=True)
def short_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    few_own_words(monkeypatch)


def config(models: Path, family: str = "qwen3", **given: Any) -> finetune.Config:
    flags = {"max_length": 48, "target_examples_per_step": 4, "num_iterations": 4, "learning_rate": 3e-3,
             "compile": False, "out_tag": "made", "device_batch_size": 2, "model": models / family, "replay_every": 0,
             "data": (str(models / "chats.jsonl"),)}  # fmt: skip
    return configured(finetune.Config, **{**flags, **given})


def losses() -> list[float]:
    return [line["loss"] for line in read_metrics(checkpoint_dir("tune", "made")) if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "llama3", "qwen3-moe"])
def test_an_adapter_learns_and_leaves_the_base_alone(models: Path, family: str) -> None:
    finetune.train(config(models, family, num_iterations=12, learning_rate=1e-2), on_cpu())
    found = losses()
    assert found[-1] < found[0] - 0.1
    loaded = load_model("tune", "made", None, on_cpu())
    published = load_qwen(models / family, on_cpu())
    tuned, adapters = dict(loaded.model.named_parameters()), 0
    for name, value in published.named_parameters():
        assert torch.equal(tuned.pop(name), value)
    assert tuned and all(".lora_" in name for name in tuned)
    with torch.no_grad():
        adapters = sum(float(value.abs().sum()) for name, value in tuned.items() if "lora_B" in name)
    assert adapters > 0
    merge_adapter(published, checkpoint_dir("tune", "made") / "step_000012", on_cpu())  # the folder that peft reads
    idx = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(published(idx), loaded.model(idx), rtol=1e-4, atol=1e-4)


def test_every_parameter_learns_and_the_checkpoint_is_a_published_folder(models: Path) -> None:
    finetune.train(config(models, lora_rank=0, learning_rate=1e-3), on_cpu())
    assert losses()[-1] < losses()[0] - 0.1
    loaded = load_model("tune", "made", None, on_cpu())
    again = load_qwen(checkpoint_dir("tune", "made") / "step_000004", on_cpu())
    idx = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(again(idx), loaded.model(idx), rtol=0, atol=0)
    assert loaded.model.config.sequence_len == 256  # the model's own context, not the rows that it was trained on


def test_every_checkpoint_of_an_adapter_is_whole_so_a_finished_run_can_begin_again(models: Path) -> None:
    finetune.train(config(models, num_iterations=1), on_cpu())
    finetune.train(config(models, num_iterations=1, resume="none", seed=7), on_cpu())
    (aside,) = checkpoint_dir("tune", "made").glob("set-aside-*")
    for folder in (aside, checkpoint_dir("tune", "made")):
        read_adapter(load_qwen(models / "qwen3", on_cpu()), folder / "step_000001")
        assert not (folder / "step_000001" / "config.json").exists()


def test_the_seed_draws_the_first_values_of_an_adapter(models: Path) -> None:
    adapters = []
    for seed in (1, 2):
        finetune.train(config(models, num_iterations=1, learning_rate=0.0, seed=seed, out_tag=f"seed{seed}"), on_cpu())
        file = checkpoint_dir("tune", f"seed{seed}") / "step_000001" / "adapter_model.safetensors"
        adapters.append(file.read_bytes())
    assert adapters[0] != adapters[1]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["answers", "dpo"])
def test_steps_compile_nothing_that_was_not_compiled_before_them(
    models: Path, monkeypatch: pytest.MonkeyPatch, loss: str
) -> None:
    from torch._dynamo.utils import counters  # seconds, which only this test needs

    real, compile_model, graphs = torch.compile, compiling._compile, []
    monkeypatch.setattr(device, "compiler_missing", lambda compute: "")
    monkeypatch.setattr(torch, "compile", lambda model, **rest: real(model, backend="eager", **rest))

    def counted(*arguments: Any) -> Any:
        fast = compile_model(*arguments)
        graphs.append(counters["stats"]["unique_graphs"])
        return fast

    monkeypatch.setattr(compiling, "_compile", counted)
    data = str(models / ("chats.jsonl" if loss == "answers" else "pairs.jsonl"))
    finetune.train(config(models, compile=True, loss=loss, data=(data,), max_length=120, eval_every=0), on_cpu())
    assert graphs and counters["stats"]["unique_graphs"] == graphs[0] > 0


def test_validation_does_not_drop_what_the_adapter_sees(models: Path) -> None:
    flags = {"num_iterations": 1, "learning_rate": 0.0, "eval_every": 1}
    found = []
    for dropout in (0.0, 0.9):
        finetune.train(config(models, **flags, lora_dropout=dropout, out_tag=f"dropout{dropout}"), on_cpu())
        found.append(read_metrics(checkpoint_dir("tune", f"dropout{dropout}"))[-1]["val_bpb"])
    assert found[0] == found[1]


def a_run(compute: Compute, models: Path, flags: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        few_own_words(patch)
        finetune.train(config(models, **flags), compute)


@pytest.mark.ranks
@pytest.mark.parametrize(("rank", "modes"), [(0, ("grad", "full")), (4, ("none", "full"))])
def test_two_ranks_learn_what_one_learns_however_they_share(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool, rank: int, modes: tuple[str, ...]
) -> None:
    finetune.train(config(models, lora_rank=rank, compile=False, replay_every=2), on_cpu())
    alone = losses()
    for mode in modes:
        monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / mode))
        pool.run(2, a_run, models, {"lora_rank": rank, "shard": mode, "replay_every": 2})
        assert losses() == pytest.approx(alone, abs=1e-4), mode
        if rank:
            read_adapter(load_qwen(models / "qwen3", on_cpu()), checkpoint_dir("tune", "made") / "step_000004")


# --- what is forgotten ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_stopped_run_with_the_models_own_words_ends_with_the_same_bits(models: Path, base_folder: Path) -> None:
    flags = {"replay_every": 2, "eval_every": 2}
    finetune.train(config(models, **flags), on_cpu())
    file = checkpoint_dir("tune", "made") / "step_000004" / "adapter_model.safetensors"
    straight = file.read_bytes()
    measured = [line.get("general_perplexity") for line in read_metrics(checkpoint_dir("tune", "made"))]
    shutil.rmtree(base_folder)
    finetune.train(config(models, **flags, stop_at=2), on_cpu())
    finetune.train(config(models, **flags), on_cpu())
    assert file.read_bytes() == straight
    again = [line.get("general_perplexity") for line in read_metrics(checkpoint_dir("tune", "made"))]
    assert again == measured and [value is not None for value in again] == [True, False, True, False, True]


def test_a_run_measures_one_general_text_to_its_end() -> None:
    """Beside the perplexity before training, which is that of the first text."""
    needed = {"model": Path("qwen3"), "data": ("chats.jsonl",)}
    cfg, other = (configured(finetune.Config, **needed, general_text=Path(name)) for name in ("a.txt", "b.txt"))
    (change,) = RunSettings.of(other).changes(RunSettings.of(cfg).values)
    assert change == "--general_text: a.txt before, b.txt now"


@pytest.mark.parametrize("every", ["auto", 4])
def test_a_run_resumes_with_its_own_words_where_other_processes_have_taken_the_memory(
    models: Path, monkeypatch: pytest.MonkeyPatch, every: Any
) -> None:
    flags = {"replay_every": every, "eval_every": 0}
    finetune.train(config(models, **flags, stop_at=2), on_cpu())
    monkeypatch.setattr(replay, "reachable", lambda compute: 1000)
    finetune.train(config(models, **flags), on_cpu())
    folder = checkpoint_dir("tune", "made")
    assert read_meta(folder, 4)["state"]["data"] == read_meta(folder, 2)["state"]["data"]


def test_own_words_in_every_row_are_refused(models: Path) -> None:
    assert "--replay_every" in refused(models, replay_every=1)


def test_captured_passes_are_refused_before_the_model_is_read(models: Path) -> None:
    assert "--graphs" in refused(models, graphs=True)


def test_own_words_beside_pairs_are_refused(models: Path) -> None:
    assert "--dpo_beta" in refused(models, replay_every=4, loss="dpo")


# --- what is left at auto ------------------------------------------------------------------------


def defaults(models: Path, **given: Any) -> finetune.Config:
    data = (str(models / "chats.jsonl"),)
    return configured(finetune.Config, model=models / "qwen3", data=data, out_tag="made", compile=False, **given)


@pytest.mark.slow
def test_few_conversations_make_thirty_steps_of_an_epoch(models: Path) -> None:
    finetune.train(defaults(models, num_epochs=1.0), on_cpu())
    assert len(losses()) >= 30


def test_flags_that_are_given_are_kept(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"max_length": 64, "target_examples_per_step": 3, "learning_rate": 1e-3}
    finetune.train(defaults(models, num_iterations=1, **sizes), on_cpu())
    out = capsys.readouterr().out
    assert "3 rows x 64 tokens" in out
    assert not [flag for flag in (*sizes, "num_epochs") if f"{flag}: " in out]  # as what auto has chosen is logged


# --- data ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "llama3"])
def test_packed_rows_give_the_gradient_of_conversations_one_by_one(models: Path, family: str) -> None:
    model = load_qwen(models / family, on_cpu())
    tokenizer: Any = FolderTokenizer(models / family, VOCABULARY)
    mixture = own_conversations([str(models / "chats.jsonl")])
    rows, _ = chat_rows("t", mixture, tokenizer, 100, 1, True, "cut")
    inputs, targets, documents = rows.batch(rows.plan_rows(0, 3))
    model(inputs, targets, "sum", context=Packed(documents)).backward()
    packed = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    seen = 0
    for row in range(3):
        for number in documents[row].unique():
            chosen = documents[row] == number
            if (targets[row, chosen] >= 0).any():
                seen += 1
                model(inputs[row, chosen][None], targets[row, chosen][None], "sum").backward()
    assert seen > 3  # rows hold several
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, packed[name], rtol=1e-4, atol=1e-4, msg=name)


def test_rows_hold_every_conversation_as_its_template_writes_it(models: Path) -> None:
    tokenizer: Any = FolderTokenizer(models / "qwen3", VOCABULARY)
    mixture = own_conversations([str(models / "chats.jsonl")])
    rows, _ = chat_rows("t", mixture, tokenizer, 64, 1, True, "cut")
    found = []
    for number in range(rows.count):
        inputs, targets, documents = (tensor[0] for tensor in rows.batch(rows.plan_rows(number, 1)))
        for document in documents.unique():
            chosen = documents == document
            if (targets[chosen] >= 0).any():
                last = targets[chosen][-1:] if targets[chosen][-1] >= 0 else inputs[:0]
                found.append((inputs[chosen].tolist() + last.tolist(), int((targets[chosen] >= 0).sum())))
    wanted = []
    for conversation in mixture.train():
        rendered = tokenizer.render(conversation)
        wanted.append((rendered.ids, sum(rendered.mask)))
    # A conversation at the end of a row may lack its last token, a line break that nobody is trained to write.
    assert sorted((ids[:-1], count) for ids, count in wanted) == sorted(
        (ids[: len(full[0]) - 1], count) for (ids, count), full in zip(sorted(found), sorted(wanted), strict=True)
    )


@pytest.mark.parametrize(("too_long", "lengths"), [("cut", {24}), ("drop", set())])
def test_a_conversation_longer_than_a_row_is_cut_or_dropped(
    models: Path, tmp_path: Path, too_long: Any, lengths: set[int]
) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the cat sat " * 20}]}
    short = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": word}]} for word in "bcde"
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in [short[0], long, *short[1:]]))
    tokenizer: Any = FolderTokenizer(models / "qwen3", VOCABULARY)
    rows, _ = chat_rows("t", own_conversations([str(path)]), tokenizer, 24, None, True, too_long)
    full = {int((rows.batch(rows.plan_rows(i, 1))[2] == 0).sum()) for i in range(rows.count)}
    assert full & {24} == lengths


def test_files_count_as_often_as_their_weights_say(models: Path, tmp_path: Path) -> None:
    for name, count in (("a", 10), ("b", 6)):
        lines = [json.dumps({"messages": [{"role": "user", "content": f"{name}{i}"},
                                          {"role": "assistant", "content": "x"}]}) for i in range(count)]  # fmt: skip
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    mixture = own_conversations([f"{tmp_path}/a.jsonl:0.5", f"{tmp_path}/b.jsonl:2"])
    held_out, asked = ([one.messages[0].text for one in part] for part in (mixture.val(), mixture.train()))
    assert sorted(asked) == sorted([f"a{i}" for i in range(0, 10, 2)] + [f"b{i}" for i in range(5)] * 2)
    assert held_out == ["b5"]
    assert mixture.key != own_conversations([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl:2"]).key
    with pytest.raises(UserError, match="the weight of a file must be above 0"):
        own_conversations([f"{tmp_path}/a.jsonl:0"])


# --- refusals ------------------------------------------------------------------------------------


def refused(models: Path, **given: Any) -> str:
    with pytest.raises(UserError) as failure:
        finetune.train(config(models, **given), on_cpu())
    assert not checkpoint_dir("tune", "made").exists()
    return str(failure.value)


def test_what_cannot_be_trained_is_named_before_the_first_step(models: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data needs at least one file"):
        config(models, data=())
    assert "made for at most 256" in refused(models, max_length=1000)
    assert "names no matrix of this model" in refused(models, lora_targets=("q_proj", "c_attn"))
    assert "config.json" in refused(models, family="chats.jsonl")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"messages": []}\nno json\n')
    assert "line 1" in refused(models, data=(str(broken),))
    shutil.copytree(models / "qwen3", tmp_path / "partial")
    (tmp_path / "partial" / "model-00002-of-00002.safetensors").unlink()
    assert "lacks 1 of 2 weight files" in refused(models, model=tmp_path / "partial")


def test_an_adapter_whose_base_has_changed_is_another_model_and_one_whose_base_is_gone_says_so(
    models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "qwen3", tmp_path / "mine")
    finetune.train(config(models, model=tmp_path / "mine", num_iterations=1), on_cpu())
    before = load_model("tune", "made", None, on_cpu()).weights
    config_file = tmp_path / "mine" / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "rms_norm_eps": 0.1}))
    assert load_model("tune", "made", None, on_cpu()).weights != before  # so kept answers are not used
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(UserError, match=r"is an adapter of the model in .*mine, which is gone"):
        load_model("tune", "made", None, on_cpu())
    shutil.copytree(models / "qwen3.5", tmp_path / "mine")
    with pytest.raises(UserError, match="which is another one now"):
        load_model("tune", "made", None, on_cpu())


def test_any_seed_that_the_flags_allow_seeds_dropout() -> None:
    assert finetune.dropout_seed(42, 3, 1) == (42 * 1_000_003 + 3) * 65_537 + 1
    device.seed_all(finetune.dropout_seed(2**63 - 1, 10**6, 1000))


@pytest.mark.slow
def test_a_forecast_tells_memory_disk_and_time_and_trains_nothing(models: Path, base_folder: Path, capsys: Any) -> None:
    finetune.train(config(models, forecast=True), on_cpu())
    said = capsys.readouterr().out
    assert [name for name in ("memory: ", "disk: ", "time: ") if name in said] == ["memory: ", "disk: ", "time: "]
    assert not list(base_folder.glob("tuned_checkpoints/*"))
    checkpoint = float(said.partition("free (")[2].split()[0])  # in kB
    finetune.train(config(models, num_iterations=1), on_cpu())
    (step,) = checkpoint_dir("tune", "made").glob("step_*")
    tensors = sum(path.stat().st_size for path in step.rglob("*.safetensors")) / 1000
    assert 0.8 * tensors < checkpoint < 1.3 * tensors


def test_a_disk_that_is_too_small_is_refused_before_the_model_writes_own_words(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=1e12, used=1e12, free=1.0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(replay, "with_own_words", lambda *_: pytest.fail("own words were written"))
    with pytest.raises(UserError, match="Free some space, or set NANOCHAT_BASE_DIR"):
        finetune.train(config(models, replay_every=2), on_cpu())


def test_a_forecast_counts_the_steps_that_the_run_takes(models: Path, capsys: Any) -> None:
    """Own words fill rows too, which a forecast counts without writing them."""
    flags: Any = {"num_iterations": None, "num_epochs": 1.0, "replay_every": 2, "max_length": 40,
                  "target_examples_per_step": 5}  # fmt: skip
    counts = []
    for own in ({"forecast": True}, {"stop_at": 1, "eval_every": 0}):
        finetune.train(config(models, **flags, **own), on_cpu())
        said = capsys.readouterr().out
        counts += [line for line in said.splitlines() if line.startswith("data: ")]
    assert counts == ["data: chats.jsonl, 216 rows of 40 tokens; 43 steps"] * 2  # of 108 rows of data, 21 steps


def test_a_run_does_not_resume_on_a_base_whose_settings_were_changed(models: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(models / "qwen3", tmp_path / "qwen3")
    finetune.train(config(models, model=copy, stop_at=1), on_cpu())
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 1e-3}))
    with pytest.raises(UserError, match=r"config\.json and chat template: \w+ before, \w+ now"):
        finetune.train(config(models, model=copy), on_cpu())
