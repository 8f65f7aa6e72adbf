"""Corpora by name: they are made, fetched or imported and then found; if there is none, the message says how."""

import io
import shlex
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat.common import UserError, write_json
from nanochat.data.corpora import Corpus, corpora, resolve, shards
from nanochat.data.shards import read_about, texts
from nanochat.data.sources import folder as made_here
from nanochat.data.sources.download import Patience
from nanochat.data.sources.fetch import download
from nanochat.data.sources.folder import quiet
from nanochat.data.sources.published import SOURCES
from nanochat.dataset import Config, import_folder, main, make_tinyworld
from nanochat.prepare.clean import clean
from tests.data.sources.conftest import server as server  # fixture: a hub
from tests.support.file_server import Server, status


def own_files(folder: Path, count: int = 30) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02d}.txt").write_text(f"text number {i}\n")
    return folder


@pytest.fixture
def tinyworld(monkeypatch) -> types.SimpleNamespace:
    """A stand-in for TinyWorld, whose documents and version a test can change."""
    module = types.SimpleNamespace(documents=lambda: iter([f"fact {i}" for i in range(200)]), VERSION="1")
    monkeypatch.setattr(made_here, "required_appendix", lambda name, flag: module)
    return module


# --- finding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "command"),
    [
        (None, "dataset --data tinyworld"),
        (None, "dataset -n 8"),
        ("tinyworld", "dataset --data tinyworld"),
        ("fineweb", "dataset -n 8"),
        ("nonsense", "dataset --data DIR"),
        (".", r"dataset --data \."),
    ],
)
def test_data_that_is_not_there_is_refused_with_the_command_that_makes_it(data, command):
    with pytest.raises(UserError, match=f"python -m nanochat.{command}") as raised:
        resolve(data)
    assert raised.value.exit_code == 2


def test_the_only_corpus_is_the_default_and_several_must_be_chosen_from(tmp_path):
    first = import_folder(own_files(tmp_path / "one"))
    assert resolve(None) == first == resolve("one") == resolve(str(tmp_path / "one"))
    second = import_folder(own_files(tmp_path / "two"), name="second")
    assert corpora() == [first, second]
    with pytest.raises(UserError, match=r"\(one, second\).* --data one") as raised:
        resolve(None)
    assert raised.value.exit_code == 2
    assert resolve("second") == second


def test_shards_are_split_into_training_and_the_last_one(base_folder):
    folder = base_folder / "base_data" / "mine"
    folder.mkdir(parents=True)
    corpus = Corpus("mine", folder)
    for i in (0, 1, 5):
        pq.write_table(pa.table({"text": [str(i)]}), folder / f"shard_{i:05d}.parquet")
    assert list(texts(shards(corpus, "train"))) == ["0", "1"]
    assert list(texts(shards(corpus, "val"))) == ["5"]
    for i in (0, 1):
        (folder / f"shard_{i:05d}.parquet").unlink()
    with pytest.raises(UserError, match="a corpus needs at least two shards"):
        shards(corpus, "train")


# --- TinyWorld and your own files ----------------------------------------------------------------


def test_tinyworld_is_made_once_and_again_when_the_package_changed(tinyworld, capsys):
    corpus = make_tinyworld()
    assert resolve("tinyworld") == corpus
    everything = set(texts(shards(corpus, "train"))) | set(texts(shards(corpus, "val")))
    assert everything == {f"fact {i}" for i in range(200)}
    before = (corpus.folder / "corpus.json").stat().st_mtime_ns
    make_tinyworld()
    assert (corpus.folder / "corpus.json").stat().st_mtime_ns == before
    assert "tinyworld is already there" in capsys.readouterr().out
    tinyworld.VERSION = "2"
    tinyworld.documents = lambda: iter(["new 1", "new 2"])
    make_tinyworld()
    assert set(texts(shards(corpus, "train"))) < {"new 1", "new 2"}


def test_a_lost_shard_is_noticed_and_made_again(tinyworld):
    corpus = make_tinyworld()
    shards(corpus, "val")[0].unlink()
    with pytest.raises(UserError, match=r"1 of 2 shards of tinyworld are missing.*--data tinyworld"):
        shards(corpus, "train")
    make_tinyworld()
    assert shards(corpus, "val")


def test_own_files_are_imported_with_subfolders_and_mixed_kinds(tmp_path):
    folder = own_files(tmp_path / "mine", 3)
    (folder / "sub").mkdir()
    (folder / "sub" / "a.jsonl").write_text('{"text": "from json"}\n')
    pq.write_table(pa.table({"text": ["from parquet"]}), folder / "sub" / "b.parquet")
    (folder / "picture.png").write_bytes(b"no text")
    corpus = import_folder(folder)
    everything = set(texts(shards(corpus, "train"))) | set(texts(shards(corpus, "val")))
    assert everything == {"text number 0", "text number 1", "text number 2", "from json", "from parquet"}


def test_an_import_is_kept_until_the_files_change(tmp_path, capsys):
    folder = own_files(tmp_path / "mine", 3)
    import_folder(folder)
    import_folder(folder)
    assert "mine is already there" in capsys.readouterr().out
    (folder / "new.txt").write_text("new text")
    corpus = import_folder(folder)
    everything = set(texts(shards(corpus, "train"))) | set(texts(shards(corpus, "val")))
    assert "new text" in everything and len(everything) == 4


def test_a_single_file_and_another_column_can_be_imported(tmp_path):
    (tmp_path / "poems.jsonl").write_text('{"正文": "一"}\n{"正文": "二"}\n')
    corpus = import_folder(tmp_path / "poems.jsonl", text_column="正文")
    assert corpus.name == "poems"
    assert set(texts(shards(corpus, "train"))) | set(texts(shards(corpus, "val"))) == {"一", "二"}


def test_names_that_are_taken_or_no_names_are_refused(tmp_path):
    import_folder(own_files(tmp_path / "mine", 3))
    other = own_files(tmp_path / "other", 3)
    with pytest.raises(UserError, match="already named 'mine'"):
        import_folder(other, name="mine")
    with pytest.raises(UserError, match="already named 'tinyworld'"):
        import_folder(other, name="tinyworld")
    with pytest.raises(UserError, match="plain folder name"):
        import_folder(other, name="a/b")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no \.parquet, \.jsonl, .*\.md.* file"):
        import_folder(tmp_path / "empty")


# --- FineWeb-Edu ---------------------------------------------------------------------------------


def path_of(server: Server, number: int) -> str:
    return SOURCES["fineweb"].url(number, "hub").removeprefix(server.url)


def serve(server: Server, *numbers: int) -> None:
    for number in numbers:
        body = io.BytesIO()
        pq.write_table(pa.table({"text": [f"{number} {i}" for i in range(10)]}), body)
        server.files[path_of(server, number)] = body.getvalue()


def names(corpus: Corpus) -> list[int]:
    return [int(path.stem[-5:]) for path in sorted(corpus.folder.glob("*.parquet"))]


def test_fineweb_shards_come_from_the_endpoint_with_the_validation_shard(server, monkeypatch, capsys):
    """A mirror does not see the token that belongs to the hub."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    serve(server, 0, 1, 2, 1822)
    monkeypatch.setenv("HF_ENDPOINT", f"{server.url}/")
    main(Config(num_files=3, num_workers=2))
    corpus = resolve(None)
    assert (corpus.name, names(corpus)) == ("fineweb", [0, 1, 2, 1822])
    assert shards(corpus, "val")[0].name == "shard_01822.parquet"
    path, headers = server.requests[0]
    assert path == "/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_00000.parquet"
    assert "Authorization" not in headers
    assert "next: python -m scripts.tok_train --data fineweb" in capsys.readouterr().out


def test_only_missing_shards_are_fetched_and_fewer_never_removes(server):
    serve(server, 0, 1, 2, 1822)
    main(Config(num_files=2))
    asked = len(server.requests)
    main(Config(num_files=2))
    assert len(server.requests) == asked
    main(Config(num_files=3))
    assert {path for path, _ in server.requests[asked:]} == {path_of(server, 2)}
    main(Config(num_files=1))
    assert names(resolve("fineweb")) == [0, 1, 2, 1822]
    assert read_about(resolve("fineweb").folder)["make"] == "python -m nanochat.dataset -n 3"


def test_an_incomplete_download_is_refused_until_it_is_resumed(server):
    serve(server, 0, 1, 2, 1822)
    server.faults = [None, None, status(404)]  # the size, the first shard, the second
    with pytest.raises(UserError, match="404"):
        main(Config(num_files=3, num_workers=1))
    with pytest.raises(UserError, match=r"of fineweb are missing.*python -m nanochat.dataset -n 3"):
        shards(resolve("fineweb"), "train")
    main(Config(num_files=3))
    assert len(shards(resolve("fineweb"), "train")) == 3


def test_no_network_names_the_mirror_and_tinyworld(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as raised:
        download(SOURCES["fineweb"], 2, quiet, patience=Patience(first_wait_seconds=0.01))
    assert corpora() == []
    for words in ("connection refused", "HF_ENDPOINT=https://hf-mirror.com", "--data tinyworld", "shard_00000"):
        assert words in str(raised.value)


def test_urls_can_be_listed_for_another_machine(capsys, base_folder):
    main(Config(num_files=1, list_urls=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == ["shard_00000.parquet", "shard_01822.parquet"]
    assert lines[0].startswith("https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/")
    assert not (base_folder / "base_data").exists()


# --- command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "named"),
    [
        (Config(), "dataset -n 8"),
        (Config(data="fineweb"), "dataset -n 8"),
        (Config(data="nowhere"), "dataset -n 8"),
        (Config(3, data="tinyworld"), "dataset -n 8"),
        (Config(0), "1 to 1822 .*got 0"),
        (Config(-2), "1 to 1822 .*got -2"),
        (Config(1823), "1 to 1822 .*got 1823"),
        (Config(1, num_workers=0), "--num_workers .*got 0"),
        (Config(1, name="web"), "--name is for your own files and addresses only"),
        (Config(data="tinyworld", text_column="body"), "--text_column is for your own files"),
        (Config(data=".", list_urls=True), "--list_urls is for published corpora only"),
        (Config(urls="list.txt", host="modelscope"), "--from is for published corpora only"),
    ],
)
def test_a_command_that_cannot_work_is_refused_with_what_can(cfg, named):
    with pytest.raises(UserError, match=named) as raised:
        main(cfg)
    assert raised.value.exit_code == 2


def test_importing_a_screened_corpus_again_says_that_the_documents_left_out_are_back(tmp_path, capsys):
    folder = own_files(tmp_path / "mine")
    main(Config(data=str(folder)))
    clean(resolve("mine"), True, None, False)
    about = read_about(resolve("mine").folder)
    about["dropped"]["documents"] = 7
    write_json(resolve("mine").folder / "corpus.json", about)
    (folder / "more.txt").write_text("one more document")
    main(Config(data=str(folder)))
    said = capsys.readouterr()
    assert "its 7 documents that were left out are back" in said.out + said.err
    assert "python -m nanochat.prepare --data mine --dedup" in said.out + said.err


def test_the_command_that_fixes_a_corpus_has_every_path_and_name_in_quotes(tmp_path, monkeypatch):
    """Split at the space, `rm -r` would delete another folder."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base dir"))
    main(Config(data=str(own_files(tmp_path / "my books")), name="all books"))
    path = shards(resolve("all books"), "train")[0]
    path.write_bytes(b"cut")
    with pytest.raises(UserError) as raised:
        main(Config(verify=True))
    command = str(raised.value).partition("Fix it with: ")[2]
    assert shlex.split(command) == [
        "rm", "-r", str(path.parent), "&&", "python", "-m", "nanochat.dataset", "--data", str(tmp_path / "my books"),
        "--name", "all books",
    ]  # fmt: skip


def test_verify_reads_every_shard(tmp_path, capsys):
    main(Config(data=str(own_files(tmp_path / "mine"))))
    main(Config(data="mine", verify=True))
    assert "mine: all 2 shards are intact" in capsys.readouterr().out
    path = shards(resolve("mine"), "train")[0]
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match="its SHA-256 is not"):
        main(Config(verify=True))


@pytest.mark.parametrize("data", ["", "~nosuchuser/x", "x" * 300])
def test_a_name_that_no_file_can_have_is_no_folder(tmp_path, monkeypatch, data):
    own_files(tmp_path / "mine")
    monkeypatch.chdir(tmp_path / "mine")
    for call in (lambda: main(Config(data=data)), lambda: resolve(data)):
        with pytest.raises(UserError, match=r"there is no (corpus|file) or folder") as raised:
            call()
        assert raised.value.exit_code == 2
