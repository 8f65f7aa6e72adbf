"""The routes of the training runs over HTTP: what is new, nothing twice, and nothing that a file holds does harm."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanochat import __version__
from nanochat.runtime.samples import Sample, keep_samples
from nanochat.runtime.trackers.jsonl import Jsonl, describe_run
from nanochat.serve.app import create_runs_app
from nanochat.serve.runs import follow, routes
from tests.support.fake_engine import SETTINGS, FakeEngine, running, serving

DATA = "/runs/data"


@pytest.fixture(autouse=True)
def always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "FRESH_SECONDS", 0)


@pytest.fixture
def client(base_folder: Path) -> Iterator[httpx.Client]:
    with serving(create_runs_app(base_folder, (), "")) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def begin(base: Path, tag: str = "d4", place: str = "base") -> Jsonl:
    folder = base / f"{place}_checkpoints" / tag
    jsonl = Jsonl(folder, 0)
    describe_run(folder, {"steps": 10})
    return jsonl


def get(client: httpx.Client, shown: str = "") -> dict[str, Any]:
    answer = client.get(DATA, params={"shown": shown})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_without_runs_the_list_is_empty(client):
    assert get(client) == {"runs": [], "older": 0, "chat": False, "shown": {}}


def test_a_reader_gets_only_what_is_new(client, base_folder):
    run = begin(base_folder)
    run.log({"step": 1, "loss": 3.0})
    (listed,) = get(client)["runs"]
    assert (listed["tag"], listed["stage"], listed["state"], listed["steps"]) == ("d4", "base", "running", 10)
    key = listed["id"]
    first = get(client, key)["shown"][key]
    assert (first["steps"], first["figures"]["loss"]["mean"]) == ([1], [3.0])
    run.log({"step": 2, "loss": 2.0})
    run.log({"step": 3, "loss": 1.0})
    second = get(client, f"{key}.{first['edition']}.1")["shown"][key]
    assert (second["from"], second["steps"]) == (0, [1, 2, 3])
    third = get(client, f"{key}.{first['edition']}.3")["shown"][key]
    assert (third["from"], third["steps"]) == (2, [3])
    run.close()
    assert get(client)["runs"][0]["state"] == "stopped"


def test_nothing_new_is_told_by_304(client, base_folder):
    run = begin(base_folder)
    run.log({"step": 1, "loss": 3.0})
    answer = client.get(DATA)
    tag = answer.headers["etag"]
    same = client.get(DATA, headers={"If-None-Match": tag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", tag)
    run.log({"step": 2, "loss": 2.0})
    assert client.get(DATA, headers={"If-None-Match": tag}).status_code == 200
    run.close()


def test_samples_are_told_newest_first(client, base_folder):
    run = begin(base_folder)
    run.close()
    (listed,) = get(client)["runs"]
    assert listed["samples"] is None
    folder = base_folder / "base_checkpoints" / "d4"
    keep_samples(folder, [Sample(5, "base_loss", "The", " cat"), Sample(9, "base_loss", "The", " dog")])
    with open(
        folder / "samples.jsonl", "a"
    ) as file:  # half of a surrogate pair, which is valid JSON and no valid UTF-8
        file.write('{"step": 10, "source": "x", "asked": "\\ud800", "said": "\\ud800"}\n')
    (listed,) = get(client)["runs"]
    assert listed["samples"]
    samples = client.get(f"/runs/samples/{listed['id']}").json()["samples"]
    assert [sample["said"] for sample in samples] == ["\ud800", " dog", " cat"]
    assert client.get("/runs/samples/..%2f..%2fetc").status_code == 404
    assert client.get("/runs/samples/other").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    "shown", ["unknown", "a.b.c.d", "..", "x.y.-1", "x.y.²", "x.y.99999999999", ",", ",".join("abcdefghi"), "\x00"]
)
def test_any_query_is_answered_or_refused(client, base_folder, shown):
    begin(base_folder).close()
    answer = client.get(DATA, params={"shown": shown})
    assert answer.status_code in (200, 400)
    assert answer.json().get("shown") == {} if answer.status_code == 200 else "shown" in answer.json()["error"]["param"]


def test_figures_that_no_browser_can_read_are_left_out(client, base_folder):
    run = begin(base_folder)
    run.close()
    path = base_folder / "base_checkpoints" / "d4" / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": NaN, "\\ud800": 1, "a": 1e999, "b": 2}\n[[[\n')
    key = get(client)["runs"][0]["id"]
    told = get(client, key)["shown"][key]
    assert told["bad"] == 1 and told["figures"]["b"] == {"mean": [2.0]}
    assert "loss" not in told["figures"] and "a" not in told["figures"]


def test_the_page_comes_with_its_headers_at_both_addresses(client):
    for path in ("/runs", "/"):
        page = client.get(path)
        assert page.status_code == 200 and "assets/runs/runs.js" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
    assert client.get("/assets/runs/runs.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/health").json() == {"status": "ok", "version": __version__}
    assert client.get("/v1/models").status_code == 404


def test_figures_need_the_key_and_the_page_does_not(base_folder):
    with serving(create_runs_app(base_folder, (), "sk-1")) as url:
        assert httpx.get(f"{url}/runs").status_code == 200
        for path in (DATA, "/runs/samples/x"):
            assert httpx.get(url + path).status_code == 401
        assert httpx.get(url + DATA, headers={"Authorization": "Bearer sk-1"}).status_code == 200
        assert httpx.get(f"{url}/runs", headers={"Host": "evil.example"}).status_code == 403


def test_a_chat_server_shows_runs_only_if_asked(base_folder):
    with running(FakeEngine()) as url:
        assert httpx.get(f"{url}/runs").status_code == httpx.get(url + DATA).status_code == 404
        assert "runs" not in httpx.get(f"{url}/v1/models").json()["data"][0]
    with running(FakeEngine(), settings=replace(SETTINGS, runs=base_folder)) as url:
        assert httpx.get(f"{url}/runs").status_code == 200
        assert httpx.get(url + DATA).json()["chat"] is True
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["runs"] is True


def test_a_long_file_is_told_piece_by_piece_and_its_reader_asks_on(client, base_folder, monkeypatch):
    monkeypatch.setattr(follow, "CHUNK_BYTES", 1000)
    run = begin(base_folder)
    for step in range(1, 101):
        run.log({"step": step, "loss": 1.0})
    size = (base_folder / "base_checkpoints" / "d4" / "metrics.jsonl").stat().st_size
    key = get(client)["runs"][0]["id"]
    pieces = [get(client, key)["shown"][key]]
    while pieces[-1]["behind"]:
        pieces.append(get(client, key)["shown"][key])
    assert len(pieces) == -(-size // 1000) > 2 and pieces[-1]["steps"][-1] == 100
    assert pieces[0]["done"] == 1000 and pieces[-1]["done"] == pieces[-1]["size"] == size
    run.close()


def test_files_that_vanish_while_they_are_shown_are_left_out(client, base_folder):
    begin(base_folder).close()
    key = get(client)["runs"][0]["id"]
    with contextlib.suppress(FileNotFoundError):
        (base_folder / "base_checkpoints" / "d4" / "metrics.jsonl").unlink()
    assert get(client, key) == {"runs": [], "older": 0, "chat": False, "shown": {}}


def test_a_request_for_many_runs_reads_no_more_than_one_for_a_single_run(client, base_folder, monkeypatch):
    monkeypatch.setattr(follow, "CHUNK_BYTES", 1000)
    for tag in ("d4", "d5"):
        run = begin(base_folder, tag)
        for step in range(1, 101):
            run.log({"step": step, "loss": 1.0})
        run.close()
    keys = [run["id"] for run in get(client)["runs"]]
    assert [told["done"] for told in get(client, ",".join(keys))["shown"].values()] == [500, 500]


def test_tables_are_dropped_by_their_cells_and_not_by_their_number(client, base_folder, monkeypatch):
    monkeypatch.setattr(routes, "MOST_CELLS", 25)
    for tag in ("a", "b", "c", "d"):
        run = begin(base_folder, tag)
        for step in range(1, 11):
            run.log({"step": step, "loss": 1.0})
        run.close()
    editions = {run["id"]: get(client, run["id"])["shown"][run["id"]]["edition"] for run in get(client)["runs"]}
    kept = [get(client, key)["shown"][key]["edition"] == edition for key, edition in reversed(editions.items())]
    assert kept[0] and not kept[-1]
