"""The processes of benchmarks: whose code they run, what they say when they fail, and what is refused."""

from pathlib import Path

import pytest

from bench import processes
from bench.processes import check_checkout, check_installed, check_upstream
from bench.text import about_rows, make_rows, standard_library
from bench.train.variants import Variant, training
from nanochat.common import UserError
from nanochat.tokenizer import Tokenizer
from tests.bench.fakes import TEXT, UPSTREAM, fake_upstream, tiny_plan

np = pytest.importorskip("numpy")


def test_a_side_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    old = UPSTREAM.replace("def setup_optimizer", "def setup_optimizers")
    plan = tiny_plan(tmp_path / "rows")
    variant = Variant("upstream", "float32")
    with (
        pytest.raises(UserError, match=r"(?s)upstream eager float32 ended with code 1.*setup_opt"),
        training(variant, plan, fake_upstream(tmp_path / "old", old)) as process,
    ):
        process.answer()


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    for folder, word in ((tmp_path / "nowhere", "nowhere"), (tmp_path, "nanochat/optim.py")):
        with pytest.raises(UserError, match=f"--upstream.*{word}") as refused:
            check_checkout("--upstream", folder)
        assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("quick", "against", "upstream", "word"),
    [
        (True, ("tiktoken",), None, "leave out"),
        (False, ("upstream",), None, "--upstream DIR"),
        (False, (), Path(), "--against upstream"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    quick: bool, against: tuple[str, ...], upstream: Path | None, word: str
) -> None:
    with pytest.raises(UserError, match=word) as refused:
        check_upstream(quick, against, upstream)
    assert refused.value.exit_code == 2


def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(UserError, match="llama-cpp needs no_such_package") as refused:
        check_installed("llama-cpp", "json", "no_such_package")
    assert refused.value.exit_code == 2


def test_a_side_has_one_thread_and_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    variables = processes.environment(Path("/checkout"), NANOCHAT_DTYPE="float32")
    assert "WORLD_SIZE" not in variables and variables["OMP_NUM_THREADS"] == "1"
    assert variables["PYTHONPATH"].startswith("/checkout") and "NANOCHAT_DTYPE" in variables


def test_rows_are_the_text_cut_and_shuffled_and_the_same_every_time(tmp_path: Path) -> None:
    about = make_rows(tmp_path / "a", 300, 16, TEXT)
    assert about == make_rows(tmp_path / "b", 300, 16, TEXT) == about_rows(tmp_path / "a")
    rows = np.load(tmp_path / "a" / "rows.npy")
    tokenizer = Tokenizer.load(tmp_path / "a")
    stream: list[int] = []
    for document in TEXT.documents:
        stream += [tokenizer.bos, *tokenizer.encode(document)]
    in_order = [tuple(stream[i : i + 17]) for i in range(0, len(stream) - 16, 17)]
    assert {tuple(row) for row in rows.tolist()} == set(in_order)
    assert tuple(rows[0].tolist()) != in_order[0] and rows.dtype == np.uint16


def test_damaged_rows_are_made_again(tmp_path: Path) -> None:
    assert about_rows(tmp_path) == {}
    make_rows(tmp_path, 300, 16, TEXT)
    data = bytearray((tmp_path / "rows.npy").read_bytes())
    data[-1] ^= 1
    (tmp_path / "rows.npy").write_bytes(data)
    assert about_rows(tmp_path) == {}
    with pytest.raises(UserError, match="100,001"):
        make_rows(tmp_path, 300, 100_000, TEXT)


def test_the_standard_library_is_python_and_nothing_installed() -> None:
    text = standard_library(200_000)
    assert 200_000 <= sum(map(len, text.documents)) < 1_000_000
    assert text == standard_library(200_000)
