"""chat_web as a user starts it: port, flags, a real model, and a clean end."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from nanochat.checkpoint_manager.files import read_meta, step_dir
from nanochat.checkpoint_manager.load import Loaded
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError
from nanochat.data.command_line import parse
from nanochat.device import compute_init
from nanochat.generate.sampling import Sampling
from nanochat.serve.address import listen
from nanochat.serve.app import create_app
from nanochat.serve.chosen import Chosen
from nanochat.serve.connections import Caps, is_loopback
from nanochat.serve.models import Loadable
from nanochat.serve.server import Settings
from scripts.chat_web import (
    Config,
    about,
    chat_web,
    check,
    models_of,
    only_runs,
    serve_until_stopped,
    settings_of,
    with_key,
)
from tests.emulated_npu.worker import on_npu
from tests.support.adapters import write_folder_with_adapter
from tests.support.fake_engine import CHAT, SETTINGS, ByteTokenizer, FakeEngine, ask, running, serving
from tests.support.tiny_model import tiny_checkpoint, tiny_gpt, tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent


def test_other_machines_get_in_only_when_asked_for_and_without_a_key_a_warning_says_so(monkeypatch, capsys):
    assert all(map(is_loopback, (Config().host, "127.0.0.1", "127.9.9.9", "localhost", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "127.evil.example", "::ffff:10.0.0.1", "")))
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    monkeypatch.setattr("scripts.chat_web.serve", lambda app, listener: None)
    app = create_app([Loadable(FakeEngine(), ByteTokenizer(), SETTINGS)], SETTINGS)  # type: ignore[arg-type]
    for cfg, warned in [(Config(), 0), (Config(host="0.0.0.0"), 1), (Config(host="0.0.0.0", api_key="k"), 0)]:
        with listen(cfg.host, 0) as listener:
            serve_until_stopped(cfg, app, listener)
        assert capsys.readouterr().err.count("without a key") == warned


def test_short_letters_are_those_of_nanochat():
    words = "-n 1 -i mid -t 0.5 -k 7 -m 9 -g d20 -s 3 -p 80 -d float32 --host 0.0.0.0".split()
    cfg = parse(Config, words)
    assert (cfg.num_gpus, cfg.source, cfg.temperature, cfg.top_k, cfg.max_tokens) == (1, "mid", 0.5, 7, 9)
    assert (cfg.model_tag, cfg.step, cfg.port, cfg.dtype, cfg.host) == ("d20", 3, 80, "float32", "0.0.0.0")
    check(cfg)


def settings(**flags: Any) -> Settings:
    return settings_of(Config(**flags))


def test_key_comes_from_the_flag_or_from_the_environment(monkeypatch):
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    assert settings().api_key == ""
    monkeypatch.setenv("NANOCHAT_API_KEY", "of the environment")
    assert settings().api_key == "of the environment"
    with pytest.raises(UserError, match=r"NANOCHAT_API_KEY .*' ' at place 3"):
        check(Config())
    assert settings(api_key="of-the-flag").api_key == "of-the-flag"
    check(Config(api_key="!sk-1~"))


@pytest.mark.parametrize("key", ["sk-密钥", "sk-\x80", "sk-\n", "sk- "])
def test_a_key_that_browsers_cannot_send_is_refused_without_repeating_it(key):
    with pytest.raises(UserError, match=r"--api_key .*at place 4") as caught:
        check(Config(api_key=key))
    assert caught.value.exit_code == 2 and key not in str(caught.value)


def test_headless_serves_no_page():
    assert settings().page and not settings(headless=True).page
    with running(FakeEngine(), settings=replace(SETTINGS, page=False)) as url:
        assert httpx.get(f"{url}/").status_code == httpx.get(f"{url}/assets/app.js").status_code == 404
        assert httpx.get(f"{url}/v1/models").status_code == 200


@pytest.mark.parametrize(
    "field", ["num_gpus=2", "temperature=3", "min_p=2", "top_k=-1", "max_tokens=0", "slots=0", "port=70000"]
)
def test_setting_that_cannot_be_is_refused_by_name(field):
    name, _, value = field.partition("=")
    with pytest.raises(UserError, match=f"--{name} must be") as caught:
        check(Config(**{name: float(value)}))
    assert caught.value.exit_code == 2


def test_programs_in_containers_reach_a_server_that_needs_a_key():
    names = {"host.docker.internal", "host.containers.internal"}
    assert names <= set(settings(api_key="sk-1").hosts) and not names & set(settings().hosts)


@pytest.mark.parametrize(
    ("origin", "key", "said"),
    [
        ("http://localhost:3000", "", ""),
        ("http://127.0.0.1", "", ""),
        ("http://[::1]:80", "", ""),
        ("https://chat.example.org", "sk-1", ""),
        ("*", "sk-1", ""),
        ("*", "", "--api_key"),
        ("https://chat.example.org", "", "--api_key"),
        ("http://localhost.example.org", "", "--api_key"),
        ("https://chat.example.org/", "sk-1", "--allow_origin must be"),
        ("https://Chat.example.org", "sk-1", "--allow_origin must be"),
        ("chat.example.org", "sk-1", "--allow_origin must be"),
        ("null", "sk-1", "--allow_origin must be"),
    ],
)
def test_pages_of_other_machines_may_only_call_a_server_with_a_key(origin, key, said, monkeypatch):
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    cfg = Config(allow_origin=(origin,), api_key=key)
    if not said:
        check(cfg)
        assert settings_of(cfg).origins == (origin,)
        return
    with pytest.raises(UserError, match=said) as caught:
        check(cfg)
    assert caught.value.exit_code == 2


def test_server_of_many_slots_admits_their_clients() -> None:
    """One client may use all slots of a server: so many connections of one address must be allowed."""
    assert settings().caps == Caps()
    caps = settings(slots=1024).caps
    assert caps.per_address > 1024 + Settings.waiting and caps.connections > caps.per_address


def test_runs_are_shown_without_a_model_if_there_is_none(base_folder):
    assert only_runs(Config(runs=True)) and only_runs(Config(runs_only=True))
    assert not only_runs(Config()) and not only_runs(Config(runs=True, source="sft"))  # which says that it is missing
    assert settings().runs is None and settings(runs=True).runs == base_folder
    meta = step_dir(checkpoint_dir("base", "d4"), 3) / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text("{}")
    assert not only_runs(Config(runs=True)) and only_runs(Config(runs_only=True))


@pytest.mark.parametrize(
    "flags",
    [
        {"runs": True, "headless": True},
        {"runs_only": True, "step": 3},
        {"runs_only": True, "also": ("sft/d4",)},
    ],
)
def test_flags_that_contradict_the_runs_are_refused(flags):
    with pytest.raises(UserError, match="leave") as caught:
        check(Config(**flags))
    assert caught.value.exit_code == 2


def test_runs_are_started_only_by_this_machine_or_with_a_key():
    start: Any = "start"
    with pytest.raises(UserError, match="--api_key") as caught:
        check(Config(runs=start, host="0.0.0.0"))
    assert caught.value.exit_code == 2
    check(Config(runs=start, host="0.0.0.0", api_key="secret"))
    check(Config(runs=start))
    assert settings(runs=start).starts and not settings(runs=True).starts


def test_a_start_without_a_key_gets_one_that_the_address_tells(monkeypatch, capsys):
    """Every user of a shared machine reaches its loopback address."""
    start: Any = "start"
    monkeypatch.delenv("NANOCHAT_API_KEY", raising=False)
    monkeypatch.setattr("scripts.chat_web.serve", lambda app, listener: None)
    first, second = (with_key(Config(runs=start)) for _ in range(2))
    assert first.api_key != second.api_key and len(first.api_key) > 32
    check(first)
    for cfg in (Config(), Config(runs=True), Config(runs=start, api_key="secret")):
        assert with_key(cfg) == cfg
    monkeypatch.setenv("NANOCHAT_API_KEY", "secret")
    assert with_key(Config(runs=start)).api_key == ""
    app = create_app([Loadable(FakeEngine(), ByteTokenizer(), SETTINGS)], SETTINGS)  # type: ignore[arg-type]
    for cfg in (first, Config(runs=start, api_key="secret")):
        with listen(cfg.host, 0) as listener:
            serve_until_stopped(cfg, app, listener)
        out = capsys.readouterr()
        said = out.out + out.err
        assert (f"/runs#key={first.api_key}" in said, f"/#key={first.api_key}" in said) == (cfg is first,) * 2
        assert "secret" not in said


@pytest.mark.parametrize(
    ("words", "value"),
    [([], False), (["--runs"], True), (["--runs=start"], "start"), (["--runs", "start"], "start"),
     (["--runs", "--port", "0"], True), (["--runs", "False"], False), (["--no-runs"], False)],
)  # fmt: skip
def test_runs_is_a_switch_that_also_takes_start(words, value):
    assert parse(Config, words).runs == value


# --- the whole program ---------------------------------------------------------------------------


def start(base: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "scripts.chat_web", "--device_type=cpu", *flags],
        cwd=ROOT,
        env={**os.environ, "NANOCHAT_BASE_DIR": str(base)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_training_can_be_watched_before_there_is_a_model(base_folder):
    process = start(base_folder, "-p", "0", "--runs")
    assert process.stdout
    try:
        said = "".join(iter(process.stdout.readline, "按 Ctrl-C 停止 / Ctrl-C stops\n"))
        url = re.search(r"watch training at: (http://127\.0\.0\.1:\d+/runs)", said)
        assert url and "no model is trained yet" in said
        assert httpx.get(url[1], timeout=60).status_code == 200
        assert httpx.get(f"{url[1]}/data", timeout=60).json()["runs"] == []
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.slow
def test_real_model_answers_and_the_server_ends_in_order(base_folder):
    tiny_checkpoint("sft", 7, tag="d4")
    process = start(base_folder, "-p", "0", "-d", "float32", "-m", "12", "--also", "sft/d4/7")
    assert process.stdout
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        said = "".join(lines)
        assert "stage sft, tag d4, step 7" in said and "temperature 1, top-k 50, top-p 1, min-p 0.5: " in said
        url = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert url, said
        with httpx.Client(base_url=url[0], timeout=60) as client:
            answers = [client.post(CHAT, json=ask("猫 cat", seed=3)).json() for _ in range(2)]
            assert answers[0]["choices"] == answers[1]["choices"]
            assert answers[0]["usage"]["completion_tokens"] <= 12
            other = client.post(CHAT, json=ask("猫 cat", seed=3, model="nanochat-sft-d4-7")).json()
            assert other["choices"] == answers[0]["choices"] and other["model"] == "nanochat-sft-d4-7"
            text = client.post(CHAT, json=ask("猫 cat", seed=3, stream=True)).text
            chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]
            words = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            assert words == answers[0]["choices"][0]["message"]["content"]
            served = client.get("/v1/models").json()["data"][0]
            assert (served["id"], served["corpus"], served["knows"]) == ("nanochat-sft-d4", "tinyworld", None)
            model = tiny_gpt(tiny_tokenizer().vocab_size)
            assert served["parameters"] == sum(parameter.numel() for parameter in model.parameters())
            defaults = {"temperature": 1, "min_p": 0.5, "top_k": 50, "max_tokens": 12}
            assert defaults.items() <= served["defaults"].items()
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err and "ERROR" not in err


def checkpoint(stage: str, step: int, before: tuple[str, int] | None = None) -> dict[str, Any]:
    """Save a step of the tiny model, which began from a step of an earlier stage; its meta.json."""
    tiny_checkpoint(stage, step)
    folder = checkpoint_dir(stage, "d2")
    meta = read_meta(folder, step)
    if before:
        meta["config"]["parent"] = f"{before[0]} d2 step {before[1]} 0123456789abcdef"
        (step_dir(folder, step) / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
    return meta


def promised(meta: dict[str, Any]) -> Any:
    """What the server says that the model of a meta.json knows."""
    tokenizer = tiny_tokenizer()
    model = tiny_gpt(tokenizer.vocab_size)
    return about(Chosen(Loaded(model, tokenizer, meta, meta["stage"], "d2", meta["step"]), 64, []))["knows"]


def test_a_model_of_few_updates_promises_nothing(base_folder):
    checkpoint("base", 20)
    checkpoint("mid", 10, ("base", 20))
    checkpoint("sft", 10, ("mid", 10))
    assert promised(checkpoint("rl", 3, ("sft", 10))) is None  # the smoke preset: 43 updates
    assert promised(checkpoint("base", 99)) is None
    assert "capitals" in promised(checkpoint("base", 100))["en"]


def test_a_model_that_is_served_already_is_refused(base_folder):
    tiny_checkpoint("sft", 7, tag="d4")
    said = "--also sft/d4 names a model that is served already, as nanochat-sft-d4"
    with listen("127.0.0.1", 0) as listener, pytest.raises(UserError, match=said):
        chat_web(Config(also=("sft/d4",)), compute_init("cpu"), listener)


# --- adapters ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return write_folder_with_adapter(tmp_path_factory.mktemp("models") / "Qwen-tiny")


def test_adapters_are_served_beside_their_base_by_one_engine(published):
    mine = str(published.parent / "mine")
    words = ["--model", str(published), "--adapter", mine, "--adapter", f"pip={mine}", "--also", f"poet={mine}"]
    cfg = parse(Config, [*words, f"other={published}", "-d", "float32"])
    models = models_of(cfg, compute_init("cpu"))
    assert [each.announced.model for each in models] == ["mine", "pip", "Qwen-tiny", "poet", "other"]
    assert [each.adapter for each in models] == ["mine", "pip", "", "poet", ""]
    assert len({id(each.engine) for each in models}) == 2
    assert models[1].announced.tag == "Qwen-tiny + mine" and models[1].announced.about["parent"] == "Qwen-tiny"
    with serving(create_app(models, settings())) as url, httpx.Client(base_url=url, timeout=60) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [
            ("mine", "Qwen-tiny"), ("pip", "Qwen-tiny"), ("Qwen-tiny", None), ("poet", "Qwen-tiny"), ("other", None),
        ]  # fmt: skip
        body = ask("the cat", temperature=0, max_tokens=12)
        said = {name: client.post(CHAT, json={**body, "model": name}).json()["choices"] for name, _ in
                [(one["id"], 0) for one in listed]}  # fmt: skip
        assert said["mine"] == said["pip"] == said["poet"] == client.post(CHAT, json=body).json()["choices"]
        assert said["Qwen-tiny"] == said["other"] != said["mine"]


@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_graphs_serve_one_model_and_its_adapters(published: Path) -> None:
    compute = compute_init("npu")
    words = {"model": published, "adapter": (f"pip={published.parent / 'mine'}",)}
    with pytest.raises(UserError, match="--graphs serves one model and its adapters"):
        models_of(Config(**words, also=(f"other={published}",), graphs=True), compute)
    (pip, base), (_, plain) = (models_of(Config(**words, graphs=graphs), compute) for graphs in (True, False))
    assert pip.engine is base.engine and base.engine.graphs is not None and plain.engine.graphs is None
    for adapter in ("pip", ""):
        sampling = Sampling(0.0, max_tokens=9, adapter=adapter)
        said = [each.engine.generate([[1, 2, 3]], sampling)[0].tokens for each in (base, plain)]
        assert said[0] == said[1]
    assert base.engine.graphs.replays > 8
