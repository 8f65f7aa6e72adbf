"""The routes that start and stop runs: arguments stay arguments, one run starts once, and no other site starts one."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanochat.runtime.trackers.jsonl import Jsonl
from nanochat.serve.app import create_runs_app
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.runs import command, control, record, routes, starter
from nanochat.serve.runs.control import Control
from nanochat.serve.runs.script import fields_of
from scripts import finetune
from tests.support.fake_engine import eventually, serving

# Stands for a script: it prints its flags, and ends in order when it is asked to.
PROGRAM = """
import json, signal, sys
signal.signal(signal.SIGTERM, lambda *_: (print("saved"), sys.exit(0)))
print(json.dumps(sys.argv[1:]))
signal.pause()
"""
NEEDED = {"model": "/models/m", "data": ["a.jsonl"]}
POSTS = ("/runs/command", "/runs/forecast", "/runs/start", "/runs/stop")
GETS = ("/runs/form", "/runs/log/x")
FIELDS = fields_of(finetune.Config)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that import no torch: the script is PROGRAM, and its tag is the --out_tag, or made."""

    async def fields(*_: Any) -> list[Any]:
        return FIELDS

    async def child(_: Control, __: Any, argv: list[str], ___: str) -> dict[str, Any]:
        tags = [word.partition("=")[2] for word in argv if word.startswith("--out_tag=")]
        return {"code": 0, "text": json.dumps({"tag": (tags or ["made"])[0]})}

    monkeypatch.setattr(routes, "FRESH_SECONDS", 0)
    monkeypatch.setattr(Control, "_fields_of", fields)
    monkeypatch.setattr(Control, "_child", child)
    monkeypatch.setattr(command, "command", lambda _, words, __: [sys.executable, "-uc", PROGRAM, *words])


@pytest.fixture
def client(base_folder: Path) -> Iterator[httpx.Client]:
    with serving(create_runs_app(base_folder, (), "", starts=True)) as url:
        with httpx.Client(base_url=url, timeout=30) as client:
            yield client
        end_all(base_folder)


def end_all(base: Path) -> None:
    for _, folder in record.folders(base):
        started = record.read(folder)
        if started and started.alive:
            os.kill(started.pid, signal.SIGKILL)


def start(client: httpx.Client, **values: Any) -> httpx.Response:
    return client.post("/runs/start", json={"values": {**NEEDED, **values}})


def started(client: httpx.Client) -> dict[str, Any]:
    return client.get("/runs/data").json()["started"]


def log(client: httpx.Client, key: str, **query: int) -> dict[str, Any]:
    return client.get(f"/runs/log/{key}", params=query).json()


def argv_of(client: httpx.Client, key: str) -> list[str]:
    eventually(lambda: "\n" in log(client, key)["text"])
    return json.loads(log(client, key)["text"].splitlines()[0])


# --- a run ---------------------------------------------------------------------------------------


def test_a_run_starts_once_is_stopped_and_resumes(client, base_folder):
    answer = start(client)
    assert answer.status_code == 201, answer.text
    key = answer.json()["id"]
    assert argv_of(client, key) == ["--model=/models/m", "--data", "a.jsonl"]
    assert started(client)[key]["state"] == "running"
    again = start(client)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "already_running")
    beside = start(client, out_tag="other")
    assert (beside.status_code, beside.json()["error"]["code"]) == (409, "devices_taken")
    for _ in range(2):  # the second signal must not cut the save short
        client.post("/runs/stop", json={"run": key})
    eventually(lambda: started(client)[key]["state"] == "ended")
    assert started(client)[key]["code"] == 0 and "saved" in log(client, key)["text"]
    assert client.post("/runs/stop", json={"run": key}).status_code == 409
    resumed = client.post("/runs/start", json={"run": key, "values": {"eval_every": "7"}})
    assert resumed.status_code == 201, resumed.text
    eventually(lambda: log(client, key)["text"].count("--model") == 2)
    assert "--eval_every=7" in log(client, key)["text"].splitlines()[-1]
    modes = [
        (base_folder / "tuned_checkpoints/made" / name).stat().st_mode & 0o777
        for name in ("started.json", "started.log")
    ]
    assert modes == [0o600, 0o600]


def test_another_server_finds_the_run_and_stops_it(client, base_folder):
    key = start(client).json()["id"]
    argv_of(client, key)
    with serving(create_runs_app(base_folder, (), "", starts=True)) as url, httpx.Client(base_url=url) as later:
        assert started(later)[key]["state"] == "running"
        assert start(later).json()["error"]["code"] == "already_running"
        assert later.post("/runs/stop", json={"run": key}).status_code == 200
        eventually(lambda: started(later)[key]["state"] == "ended")


def test_a_run_of_a_terminal_is_not_started_a_second_time(client, base_folder):
    run = Jsonl(base_folder / "tuned_checkpoints" / "made", 0)
    assert start(client).json()["error"]["code"] == "already_running"
    run.close()
    assert start(client).status_code == 201


def test_a_refusal_of_the_script_is_told(client, monkeypatch):
    async def child(*_: Any) -> dict[str, Any]:
        return {"code": 2, "text": "error: --lora_rank must be <b>\n"}

    monkeypatch.setattr(Control, "_child", child)
    answer = start(client)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "refused")
    assert started(client) == {}


def test_a_child_ends_with_its_request(monkeypatch):
    """A forecast that takes too long is ended with all of its processes, and its output is bounded."""
    endless = "import os, subprocess, sys; subprocess.Popen(['sleep', '99']); print(os.getpid(), flush=True); os.wait()"
    noisy = "import sys; print('x' * 10**6); print('end'); sys.exit(3)"
    ended = asyncio.run(control._output_of([sys.executable, "-c", noisy], os.environ, 100))
    assert (ended["code"], len(ended["text"])) == (3, 100) and ended["text"].endswith("end\n")
    monkeypatch.setattr(control, "CHILD_SECONDS", 0.5)
    killed: list[int] = []
    really = os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (killed.append(group), really(group, number)))
    with pytest.raises(ApiError) as caught:
        asyncio.run(control._output_of([sys.executable, "-c", endless], os.environ, 100))
    assert caught.value.status == 504 and len(killed) == 1


# --- fields --------------------------------------------------------------------------------------


def test_values_arrive_as_they_are(client):
    """Nothing passes through a shell, and no value becomes another flag."""
    evil = "a; touch /tmp/x & $(id) `id` > y | z \"q\" 'p' \\ %s *\n--resume=none 猫"
    key = start(client, run=evil, out_tag="-rf", data=["a b", "$HOME", "x;y", "../../etc/passwd"], profile=True).json()[
        "id"
    ]
    words = argv_of(client, key)
    assert words[0] == "--model=/models/m" and "--profile=True" in words
    assert words[1:6] == ["--data", "a b", "$HOME", "x;y", "../../etc/passwd"]
    assert f"--run={evil}" in words and "--out_tag=-rf" in words


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run", "a\0b"),
        ("run", "\ud800"),
        ("run", "x" * 5000),
        ("run", 3),
        ("run", ["a"]),
        ("data", "a.jsonl"),
        ("data", ["--resume=none"]),
        ("data", ["a.jsonl", "-x"]),
        ("data", ["x"] * 300),
        ("data", [3]),
        ("data", []),
        ("model", ""),
        ("profile", "True"),
        ("forecast", True),
        ("--resume", "none"),
    ],
)  # fmt: skip
def test_values_that_no_flag_takes_are_refused(client, name, value):
    body = json.dumps({"values": {**NEEDED, name: value}})
    answer = client.post("/runs/start", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_value", name)
    assert started(client) == {}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b'{"values": []}', 400),
        (b'{"run": 3}', 400),
        (b'{"run": "nothing"}', 404),
        (b'{"values": {"model": "m", "data": ["a"]}, "processes": 2}', 400),
        (b'{"values": {"model": "m", "data": ["a"]}, "language": "xx"}', 400),
        (b"[" * 100_000, 400),
        (b'{"x": "' + b"x" * 300_000 + b'"}', 413),
    ],
)
def test_bodies_that_are_no_form_are_refused(client, body, status):
    assert client.post("/runs/start", content=body, headers={"Content-Type": "application/json"}).status_code == status


@pytest.mark.parametrize("tag", ["a/b", "..", ".hidden", "x" * 300])
def test_a_tag_that_is_no_folder_is_refused(client, base_folder, tag):
    assert start(client, out_tag=tag).json()["error"]["code"] == "refused"
    assert not (base_folder / "tuned_checkpoints").exists()


def test_a_resumed_run_keeps_its_name_and_what_it_learns(client):
    key = start(client).json()["id"]
    names = {field["name"] for field in client.get("/runs/form", params={"run": key}).json()["fields"]}
    assert {"save_every", "other_code", "data"} <= names
    assert not {"out_tag", "lora_rank", "learning_rate"} & names
    for name in ("out_tag", "lora_rank"):
        answer = client.post("/runs/start", json={"run": key, "values": {name: "9"}})
        assert answer.json()["error"]["param"] == name


# --- who may -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "evil.example"},
        {"X-Forwarded-For": "10.0.0.1"},
        {"Host": "192.168.1.5:8000"},
    ],
    ids=str,
)
def test_other_sites_and_machines_are_refused(client, headers):
    """Neither a page elsewhere, nor one whose name was made to point here, may read or start anything."""
    headers = {**headers, "Connection": "close"}
    for path in (*GETS, "/runs/data", "/runs/samples/x"):
        assert client.get(path, headers=headers).status_code == 403
    for path in POSTS:
        assert client.post(path, json={"values": NEEDED}, headers=headers).status_code == 403
    assert started(client) == {}


def test_what_a_form_of_another_site_can_send_is_refused(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        for path in POSTS:
            answer = client.post(path, content=json.dumps({"values": NEEDED}), headers={"Content-Type": kind})
            assert answer.status_code == 415


def test_a_key_lets_other_machines_in_and_nobody_else(base_folder):
    with (
        serving(create_runs_app(base_folder, ("here.example",), "secret", starts=True)) as url,
        httpx.Client(base_url=url) as client,
    ):
        key = {"Authorization": "Bearer secret"}
        client.headers["Connection"] = "close"
        body = {"values": NEEDED}
        for path in POSTS:
            assert client.post(path, json=body).status_code == 401
        there = {**key, "Host": "here.example", "Origin": "https://here.example", "X-Forwarded-For": "10.0.0.1"}
        # A proxy that speaks TLS may ask under a name of its own; the key alone says who may.
        proxied = {**there, "Host": "127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}
        for headers in (there, proxied):
            assert client.post("/runs/command", json=body, headers=headers).status_code == 200
            assert client.get("/runs/data", headers=headers).status_code == 200


def test_without_runs_start_there_is_nothing_to_call(base_folder):
    with serving(create_runs_app(base_folder, (), "")) as url, httpx.Client(base_url=url) as client:
        assert "started" not in client.get("/runs/data").json()
        # each on its own connection: the server closes one whose body it has not read
        assert [httpx.post(f"{url}{path}", json={}).status_code for path in POSTS] == [404] * 4
        assert [client.get(path).status_code for path in GETS] == [404] * 2


# --- records and logs ----------------------------------------------------------------------------


def test_records_of_others_are_not_believed(client, base_folder):
    """A record says which process to signal and what to start: only this user may have written it."""
    key = start(client).json()["id"]
    folder = base_folder / "tuned_checkpoints" / "made"
    path = folder / record.RECORD
    content = path.read_text()
    path.chmod(0o644)
    assert started(client) == {}
    path.chmod(0o600)
    assert key in started(client)
    other = folder / "elsewhere.json"
    path.rename(other)
    path.symlink_to(other)
    assert started(client) == {}
    for damaged in ("{", "[]", "{}", content.replace('"pid":', '"pid": "1", "x":'), "[" * 100_000):
        path.unlink()
        path.write_text(damaged)
        path.chmod(0o600)
        assert started(client) == {}
    os.replace(other, path)


def test_a_process_that_took_the_number_is_not_signalled(client, base_folder):
    key = start(client).json()["id"]
    folder = base_folder / "tuned_checkpoints" / "made"
    mine = record.read(folder)
    assert mine is not None
    time.sleep(0.05)  # a process is known by its start in ticks of 10 ms, and a number is not reused so soon
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as stranger:
        fields = {**vars(mine), "pid": stranger.pid}
        record.write(folder, record.Record(**fields))
        assert started(client)[key]["state"] == "ended"
        assert client.post("/runs/stop", json={"run": key}).status_code == 409
        assert stranger.poll() is None
        stranger.kill()
    record.write(folder, mine)


def test_a_log_is_sent_in_parts_of_whole_lines_as_plain_text(base_folder, monkeypatch):
    monkeypatch.setattr(starter, "LOG_BYTES", 40)
    folder = base_folder / "tuned_checkpoints" / "made"
    folder.mkdir(parents=True)
    path = folder / record.LOG
    lines = [f"line {number} 猫 <b>\x1b[31m\n" for number in range(9)]
    path.write_text("".join(lines) + "no end")
    path.chmod(0o600)
    run = routes.Run("tune", folder)
    mine = record.Record(os.getpid(), record.born(os.getpid()) or "", ("x",), {}, 1, time.time())
    record.write(folder, mine)
    logs = starter.Starter(base_folder)
    place, text = 0, ""
    while part := logs.log(run, place)["text"]:
        assert part.endswith("\n")
        text += part
        place = logs.log(run, place)["next"]
    assert text == "".join(lines).replace("\x1b", "\\x1b")
    record.write(folder, record.Record(**{**vars(mine), "code": 0}))
    assert logs.log(run, place)["text"] == "no end"
    assert logs.log(run, 10**9)["next"] == path.stat().st_size == logs.log(run, None)["next"]
    path.chmod(0o644)
    with pytest.raises(ApiError):
        logs.log(run, None)
