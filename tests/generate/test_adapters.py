"""Several adapters in one batch, against peft, merged models and the same requests alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.adapter import read_adapter, save_adapter
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.common import UserError
from nanochat.engine import Engine
from nanochat.generate import adapters as module
from nanochat.generate.adapters import NONE, Adapters
from nanochat.generate.sampling import Sampling
from nanochat.models.lora import LoraConfig, merge
from nanochat.models.qwen.model import Qwen
from tests.support.adapters import with_adapter
from tests.support.qwens import VOCABULARY, oracle, tiny_qwen, write_folder

NAMES = ("wide", "narrow", "scaled")
SHAPES = {
    "qwen3": (
        LoraConfig(4, 12.0),
        LoraConfig(1, 3.0, targets=("q_proj", "down_proj")),
        LoraConfig(7, 5.0, targets=("v_proj", "gate_proj"), stabilised=True),
    ),
    "qwen3.5": (
        LoraConfig(4, 12.0, targets=("in_proj_qkv", "out_proj", "down_proj")),
        LoraConfig(1, 3.0, targets=("in_proj_a", "o_proj")),
        LoraConfig(7, 5.0, targets=("q_proj", "in_proj_z"), stabilised=True),
    ),
}
GREEDY = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=list(SHAPES))
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published model with three adapters of different ranks and targets beside it."""
    place = tmp_path_factory.mktemp("models") / "base"
    place.mkdir()
    write_folder(place, family)
    for seed, (name, config) in enumerate(zip(NAMES, SHAPES[family], strict=True)):
        save_adapter(with_adapter(family, config, seed, 0.3), config, str(place), place.parent / name)
    return place


def holding(family: str, folder: Path) -> tuple[Qwen, Adapters]:
    model = tiny_qwen(family)
    given = {name: read_adapter(model, folder.parent / name) for name in NAMES}
    return model, Adapters(model, given, torch.float32, model.device)


def engine(family: str, folder: Path, slots: int = 8, **options: Any) -> Engine:
    model, adapters = holding(family, folder)
    return Engine(model, FolderTokenizer(folder, VOCABULARY), slots, adapters=adapters, **options)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = [20 + 9 * i for i in range(count)]
    return [torch.randint(0, 300, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("count", [40, 1])  # a prompt, and a decoding pass
@pytest.mark.parametrize("spread", [0, 4])  # the halves of each row's adapter, and those of all names
def test_every_row_has_the_logits_that_peft_gives_its_adapter(
    family: str, folder: Path, count: int, spread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    monkeypatch.setattr(module, "SPREAD", spread)
    model, adapters = holding(family, folder)
    idx = torch.randint(0, VOCABULARY, (5, count), generator=torch.Generator().manual_seed(2))
    plain = model(idx)
    with torch.no_grad(), adapters.rows([1, NONE, 0, 2, 1]):
        mixed = model(idx)
    torch.testing.assert_close(model(idx), plain, rtol=0, atol=0)  # outside, the model is itself
    torch.testing.assert_close(mixed[1], plain[1], rtol=1e-5, atol=1e-5)
    for name, rows in (("wide", [2]), ("narrow", [0, 4]), ("scaled", [3])):
        theirs = peft.PeftModel.from_pretrained(oracle(tiny_qwen(family)), folder.parent / name).eval()
        with torch.no_grad():
            wanted = theirs(idx[rows]).logits
        torch.testing.assert_close(mixed[rows], wanted, rtol=1e-4, atol=1e-4)
        assert (wanted - plain[rows]).abs().max() > 0.05
        with torch.no_grad(), adapters.rows([adapters.number(name)] * len(rows)):
            torch.testing.assert_close(model(idx[rows]), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [False, True])
def test_a_mixed_batch_says_what_each_adapter_says_alone_and_merged(family: str, folder: Path, pad: bool) -> None:
    asked = [(prompt, name) for prompt, name in zip(prompts(6), ("", *NAMES, "wide", "narrow"), strict=True)]
    mixed = engine(family, folder, pad=pad)
    said: dict[int, list[int]] = {}
    for prompt, name in asked:  # they come one after the other, so that prompts are read beside replies
        said[mixed.submit(prompt, replace(GREEDY, adapter=name))] = []
        for event in mixed.step():
            said[event.request].append(event.token)
    while mixed.busy:
        for event in mixed.step():
            said[event.request].append(event.token)
    for reply, (prompt, name) in zip(said.values(), asked, strict=True):
        (alone,) = engine(family, folder, slots=1).generate([prompt], replace(GREEDY, adapter=name))
        assert reply == alone.tokens, name
        whole = tiny_qwen(family)
        if name:
            seed = NAMES.index(name)
            whole = with_adapter(family, SHAPES[family][seed], seed, 0.3)
            merge(whole)
        (merged,) = Engine(whole, FolderTokenizer(folder, VOCABULARY), 1).generate([prompt], GREEDY)
        assert reply == merged.tokens, name


def test_what_one_adapter_has_read_is_not_used_for_another(family: str, folder: Path) -> None:
    (prompt,) = prompts(1)
    prompt = prompt * 3
    one = engine(family, folder, slots=4)
    wide, narrow, bare = (replace(GREEDY, adapter=name, max_tokens=4) for name in ("wide", "narrow", ""))
    first = one.generate([prompt], wide)[0]
    assert one.prompt_tokens_reused == 0
    other, plain = one.generate([prompt], narrow)[0], one.generate([prompt], bare)[0]
    assert one.prompt_tokens_reused == 0 and first.tokens != other.tokens != plain.tokens
    assert one.generate([prompt], wide)[0].tokens == first.tokens and one.prompt_tokens_reused == len(prompt) - 1
    together = engine(family, folder, slots=4)  # those that come at once do not share either
    numbers = [together.submit(prompt, settings) for settings in (wide, narrow, bare, wide)]
    said: dict[int, list[int]] = {number: [] for number in numbers}
    while together.busy:
        for event in together.step():
            said[event.request].append(event.token)
    assert [said[number] for number in numbers] == [first.tokens, other.tokens, plain.tokens, first.tokens]
    assert together.prompt_tokens_reused == len(prompt) - 1


def test_rows_of_a_graph_are_changed_in_place(family: str, folder: Path) -> None:
    model, adapters = holding(family, folder)
    idx = torch.randint(0, VOCABULARY, (3, 1), generator=torch.Generator().manual_seed(2))
    kept = []
    for numbers in ([1, 1, 1], [NONE, 0, 2], [NONE, NONE, NONE]):
        with torch.no_grad():
            with adapters.rows(numbers):
                wanted = model(idx)
            with adapters.rows(numbers, fixed=True):
                torch.testing.assert_close(model(idx), wanted, rtol=1e-5, atol=1e-5)
                assert adapters.current is not None
                kept.append(adapters.current.mask.data_ptr())
    assert len(set(kept)) == 1


def test_an_unknown_adapter_is_refused_before_it_reaches_a_step(family: str, folder: Path) -> None:
    one = engine(family, folder)
    for ask in (one.submit, one.check):
        with pytest.raises(UserError, match="no adapter 'poet': this model has 'wide', 'narrow', 'scaled'"):
            ask([1, 2, 3], Sampling(adapter="poet"))
    bare = Engine(tiny_qwen(family), FolderTokenizer(folder, VOCABULARY), 1)
    with pytest.raises(UserError, match="no adapter 'poet': this engine has none"):
        bare.submit([1, 2, 3], Sampling(adapter="poet"))
    assert not one.busy and not bare.busy


def test_adapters_are_held_once_and_are_no_parameters(family: str, folder: Path) -> None:
    model, adapters = holding(family, folder)
    plain = tiny_qwen(family)
    assert adapters.names == list(NAMES)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert model.parameter_counts() == plain.parameter_counts()


def test_matrices_of_one_adapter_may_have_ranks_and_alphas_of_their_own(tmp_path: Path) -> None:
    import peft

    config = peft.LoraConfig(
        r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"], init_lora_weights=False,
        rank_pattern={"down_proj": 6}, alpha_pattern={r"layers\.1\..*": 2},
    )  # fmt: skip
    theirs = peft.get_peft_model(oracle(tiny_qwen("qwen3")), config).eval()
    theirs.save_pretrained(tmp_path)
    model = tiny_qwen("qwen3")
    adapters = Adapters(model, {"one": read_adapter(model, tmp_path)}, torch.float32, model.device)
    idx = torch.arange(20)[None]
    with torch.no_grad(), adapters.rows([0]):
        torch.testing.assert_close(model(idx), theirs(idx).logits, atol=3e-5, rtol=1e-5)
