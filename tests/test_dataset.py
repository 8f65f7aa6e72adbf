"""Corpora by name: they are made, fetched or imported and then found; if there is none, the message says how."""

import io
import shlex
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    for name in ("HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "base"


def own_files(folder: Path, count: int = 30) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"{i:02d}.txt").write_text(f"text number {i}\n")
    return folder


@pytest.fixture
def tinyworld(monkeypatch) -> types.SimpleNamespace:
    """A stand-in for TinyWorld, whose documents and version a test can change."""
    module = types.SimpleNamespace(documents=lambda: iter([f"fact {i}" for i in range(200)]), VERSION="1")
    monkeypatch.setattr(made_here, "tinyworld", module)
    return module


# --- finding -------------------------------------------------------------------------------------


def test_no_data_at_all_prints_the_commands_that_make_it():
    with pytest.raises(UserError) as raised:
        resolve(None)
    assert raised.value.exit_code == 2
    for command in (
        "python -m nanochat.dataset --data tinyworld",
        "python -m nanochat.dataset -n 8",
        "python -m scripts.tok_train",
    ):
        assert command in str(raised.value)


def test_the_only_corpus_is_the_default_and_several_must_be_chosen_from(tmp_path):
    first = import_folder(own_files(tmp_path / "one"))
    assert resolve(None) == first == resolve("one") == resolve(str(tmp_path / "one"))
    second = import_folder(own_files(tmp_path / "two"), name="second")
    assert corpora() == [first, second]
    with pytest.raises(
        UserError, match=r"several corpora \(one, second\); choose one with --data, such as --data one"
    ) as raised:
        resolve(None)
    assert raised.value.exit_code == 2
    assert resolve("second") == second


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("tinyworld", "no corpus or folder 'tinyworld'; there is no corpus yet.*dataset --data tinyworld"),
        ("fineweb", "dataset -n 8"),
        ("nonsense", "dataset --data DIR"),
        (".", r"\. is not imported yet. Import it with: python -m nanochat.dataset --data \."),
    ],
)
def test_an_unknown_name_says_how_to_make_it(data, message):
    with pytest.raises(UserError, match=message) as raised:
        resolve(data)
    assert raised.value.exit_code == 2


def test_shards_are_split_into_training_and_the_last_one(base):
    folder = base / "base_data" / "mine"
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


def test_the_real_tinyworld_has_both_sides_and_no_document_on_both():
    corpus = make_tinyworld()
    train, val = (set(texts(shards(corpus, split))) for split in ("train", "val"))
    assert len(train) > 10_000 and len(val) > 100 and not train & val


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
    with pytest.raises(UserError, match=r"no \.parquet, \.jsonl, \.txt, \.md file"):
        import_folder(tmp_path / "empty")


# --- FineWeb-Edu ---------------------------------------------------------------------------------


class Hub:
    """A server that has every shard, and records the requests."""

    def __init__(self) -> None:
        hub = self
        self.requests: list[tuple[str, str | None]] = []
        self.missing: set[str] = set()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append((self.path, self.headers.get("Authorization")))
                name = self.path.rpartition("/")[2]
                body = io.BytesIO()
                pq.write_table(pa.table({"text": [f"{name} {i}" for i in range(10)]}), body)
                self.send_response(404 if name in hub.missing else 200)
                self.send_header("Content-Length", str(len(body.getvalue())))
                self.end_headers()
                self.wfile.write(body.getvalue())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server.server_port}/")
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def names(corpus: Corpus) -> list[int]:
    return [int(path.stem[-5:]) for path in sorted(corpus.folder.glob("*.parquet"))]


def test_fineweb_shards_come_from_the_endpoint_with_the_validation_shard(hub, monkeypatch, capsys):
    """A mirror does not see the token that belongs to the hub."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    main(Config(num_files=3, num_workers=2))
    corpus = resolve(None)
    assert (corpus.name, names(corpus)) == ("fineweb", [0, 1, 2, 1822])
    assert shards(corpus, "val")[0].name == "shard_01822.parquet"
    prefix = "/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/shard_00000.parquet"
    assert hub.requests[0] == (prefix, None)
    assert "next: python -m scripts.tok_train --data fineweb" in capsys.readouterr().out


def test_only_missing_shards_are_fetched_and_fewer_never_removes(hub):
    main(Config(num_files=2))
    asked = len(hub.requests)
    main(Config(num_files=2))
    assert len(hub.requests) == asked
    main(Config(num_files=3))
    assert {path for path, _ in hub.requests[asked:]} == {hub.requests[0][0].replace("00000", "00002")}
    main(Config(num_files=1))
    assert names(resolve("fineweb")) == [0, 1, 2, 1822]
    assert read_about(resolve("fineweb").folder)["make"] == "python -m nanochat.dataset -n 3"


def test_an_incomplete_download_is_refused_until_it_is_resumed(hub):
    hub.missing = {"shard_00001.parquet"}
    with pytest.raises(UserError, match="404"):
        main(Config(num_files=3, num_workers=1))
    with pytest.raises(UserError, match=r"of fineweb are missing.*Get them with: python -m nanochat.dataset -n 3"):
        shards(resolve("fineweb"), "train")
    hub.missing = set()
    main(Config(num_files=3))
    assert len(shards(resolve("fineweb"), "train")) == 3


def test_no_network_names_the_mirror_and_tinyworld(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError) as raised:
        download(SOURCES["fineweb"], 2, quiet, patience=Patience(first_wait_seconds=0.01))
    assert corpora() == []
    for words in ("connection refused", "HF_ENDPOINT=https://hf-mirror.com", "--data tinyworld", "shard_00000"):
        assert words in str(raised.value)


def test_a_full_disk_is_noticed_before_the_download(hub, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: types.SimpleNamespace(free=100))
    with pytest.raises(UserError, match=r"needs about 0\.0 GB.*has 0\.0 GB free"):
        main(Config(num_files=2))
    assert len(hub.requests) == 1  # only the request for the size


def test_a_corrupt_shard_is_fixed_by_the_command_it_names(hub):
    main(Config(num_files=2))
    path = shards(resolve("fineweb"), "train")[1]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=rf"expected [\d,]+\. Fix it with: rm -r {path} && python .* -n 2"):
        list(texts([path]))
    path.unlink()
    main(Config(num_files=2))
    assert next(texts([path])) == "shard_00001.parquet 0"


def test_urls_can_be_listed_for_another_machine(capsys, base):
    main(Config(num_files=1, list_urls=True))
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines] == ["shard_00000.parquet", "shard_01822.parquet"]
    assert lines[0].startswith("https://huggingface.co/datasets/karpathy/fineweb-edu-100b-shuffle/resolve/main/")
    assert not (base / "base_data").exists()


@pytest.mark.parametrize("count", [0, -2, 1823])
def test_impossible_numbers_of_shards_are_refused(count):
    with pytest.raises(UserError, match=f"1 to 1822 training shards, or -1 for all, got {count}"):
        main(Config(num_files=count))


# --- command line --------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [Config(), Config(data="fineweb"), Config(data="nowhere"), Config(3, data="tinyworld")])
def test_an_unclear_command_names_those_that_work(cfg):
    with pytest.raises(UserError, match=r"python -m nanochat\.dataset -n 8") as raised:
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


@pytest.mark.parametrize("workers", [0, -3])
def test_downloads_need_a_worker(workers):
    with pytest.raises(UserError, match="--num_workers must be at least 1") as raised:
        main(Config(num_files=1, num_workers=workers))
    assert raised.value.exit_code == 2
