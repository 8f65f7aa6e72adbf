"""The wheel of nanochat holds every file of the packages, and its scripts train and serve outside the tree."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from pathlib import Path

import pytest

import nanochat

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("nanochat", "scripts", "tasks")
TINY = ["--depth=1", "--model_dim=32", "--head_dim=32", "--max_seq_len=64", "--total_batch_size=512"]
SHORT = ["--num_iterations=2", "--no_compile", "--eval_every=0", "--samples=0"]
SERVER_SECONDS = 300

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built as dev/build_wheels.sh builds it: in a copy of the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    script = (ROOT / "dev" / "build_wheels.sh").read_text(encoding="utf-8")
    only_python = script[: script.index("\nrust=(")]
    command = ["bash", "-c", re.sub(r"(?m)^CDPATH.*\n", "", only_python)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([*command, "build_wheels", str(folder)], cwd=ROOT, env={**os.environ, "PATH": path}, check=True)
    return next(folder.glob("nanochat_ascend-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, which comes before all other packages."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True)
    return folder


def test_the_wheel_has_every_file_of_the_packages_and_the_version(wheel: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert [name for name in listed if name and (ROOT / name).exists() and name not in names] == []
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {*PACKAGES}
    assert f"nanochat_ascend-{nanochat.__version__}-" in wheel.name


def test_the_installed_scripts_train_and_serve_outside_the_tree(installed: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    environment = {**os.environ, "PYTHONPATH": str(installed), "NANOCHAT_BASE_DIR": str(base), "NANOCHAT_DEVICE": "cpu"}

    def python(*words: str) -> str:
        command = [sys.executable, *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    place = "import nanochat, scripts, tasks; print(nanochat.__file__, scripts.__file__, tasks.__file__)"
    assert all(file.startswith(str(installed)) for file in python("-c", place).split())
    data = ["--data", "tinyworld"]
    python("-m", "nanochat.dataset", *data)
    python("-m", "scripts.tok_train", *data, "--vocab_size=512")
    python("-m", "scripts.base_train", *data, "--model_tag=tiny", *TINY, *SHORT)
    python("-m", "nanochat.report", "generate")
    serve = ["-m", "scripts.chat_web", "-i", "base", "--port", "0"]
    log = tmp_path / "log"
    with open(log, "w", encoding="utf-8") as file:
        server = subprocess.Popen([sys.executable, *serve], cwd=tmp_path, env=environment, stdout=file, stderr=file)
    try:
        url = address(server, log)
        assert json.loads(fetch(f"{url}/health"))["version"] == nanochat.__version__
        assert b"<html" in fetch(url)
        reply = fetch(f"{url}/v1/completions", {"prompt": "The capital", "max_tokens": 3})
        assert json.loads(reply)["usage"]["completion_tokens"] <= 3
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=60)


def address(server: "subprocess.Popen[bytes]", log: Path) -> str:
    """The URL that the server prints, as soon as it does."""
    end = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end and server.poll() is None:
        words = log.read_text(encoding="utf-8", errors="replace").split()
        if urls := [word.strip(".,") for word in words if word.startswith("http://")]:
            return urls[0].rstrip("/")
        time.sleep(0.2)
    raise AssertionError(log.read_text(encoding="utf-8", errors="replace"))


def fetch(url: str, body: object = None) -> bytes:
    request = urllib.request.Request(url, headers={"Content-Type": "application/json"})
    request.data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read()
