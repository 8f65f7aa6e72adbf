"""The images, and the examples of jobs for ModelArts and Kubernetes."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repository.test_docs import commands, problem

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples"
BASES = {
    "docker/Dockerfile": "python:3.11-slim-bookworm",
    "docker/ascend.Dockerfile": "ascend/cann:9.0.0-910b-ubuntu22.04-py3.11",
}

# --- images ----------------------------------------------------------------------------------------


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile as (instruction, rest), with continued lines joined and comments removed."""
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    words = "\n".join(lines).replace("\\\n", " ").split("\n")
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in words if line.strip())]


def image_problems(name: str) -> list[str]:
    """The problems of a Dockerfile."""
    said = instructions(name)
    known = "ARG FROM USER RUN WORKDIR COPY ENV VOLUME EXPOSE CMD".split()
    found = [f"unknown instruction {word}" for word, _ in said if word not in known]
    if said[:2] != [("ARG", f"BASE={BASES[name]}"), ("FROM", "${BASE}")]:
        found.append("the base image")
    for word, rest in said:
        if word == "RUN":
            shell = subprocess.run(["bash", "-n"], input=rest, text=True, capture_output=True)
            found += [shell.stderr] if shell.returncode else []
            found += [why for command in commands(rest) if (why := problem(command))]
        elif word == "CMD":
            found += filter(None, [problem(json.loads(rest))])
    return found


@pytest.mark.parametrize("name", BASES)
def test_an_image_uses_files_and_flags_that_exist(name: str) -> None:
    assert image_problems(name) == []
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.search(r"https?://|\w\.(io|com|org|cn)\b", text), "an image names no registry's host"
    for line in text.splitlines():
        if line.startswith("# ") and (found := re.search(r"docker build .*-f (\S+)", line)):
            assert (ROOT / found[1]).exists()


@pytest.mark.parametrize("name", BASES)
def test_an_image_runs_as_a_user_and_can_be_pinned(name: str) -> None:
    steps = instructions(name)
    assert [rest for word, rest in steps if word == "USER"][-1] == "nanochat", "the program is not root"
    at = [word for word, _ in steps].index("COPY")
    assert steps[at][1].startswith("--chown=nanochat ") and steps[at + 1] == ("USER", "nanochat")
    text = (ROOT / name).read_text(encoding="utf-8")
    assert f"--build-arg BASE={BASES[name]}@sha256:DIGEST" in text, "how to name the base image by its digest"


def test_the_context_of_a_build_has_every_tracked_file() -> None:
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert ".venv" in left_out and ".git" in left_out
    for file in tracked:
        assert not any(file == name or file.startswith(f"{name}/") for name in left_out), file


# --- examples --------------------------------------------------------------------------------------


def shell_problems(text: str) -> list[str]:
    """The problems of a command line of an example."""
    shell = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    found = [shell.stderr] if shell.returncode else []
    return [*found, *(why for words in commands(text) if (why := problem(words)))]


def test_the_volcano_job_is_complete() -> None:
    (job,) = yaml.safe_load_all((EXAMPLES / "volcano-job.yaml").read_text(encoding="utf-8"))
    spec = job["spec"]
    (task,) = spec["tasks"]
    assert task["replicas"] == spec["minAvailable"]
    pod: dict[str, Any] = task["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"] == {"huawei.com/Ascend910": 8}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(variable["value"], str) for variable in container["env"])
    assert shell_problems(container["command"][2]) == []


def test_the_modelarts_job_is_complete() -> None:
    job = json.loads((EXAMPLES / "modelarts-job.json").read_text(encoding="utf-8"))
    algorithm, spec = job["algorithm"], job["spec"]
    assert all(isinstance(value, str) for value in algorithm["environments"].values())
    assert not any(name.startswith("MA_") for name in algorithm["environments"]), "only the platform sets these"
    assert algorithm["environments"]["NANOCHAT_BASE_DIR"] == spec["volumes"][0]["nfs"]["local_path"]
    assert shell_problems(algorithm["command"]) == []
    workdir = next(rest for word, rest in instructions("docker/ascend.Dockerfile") if word == "WORKDIR")
    assert f"cd {workdir}" in algorithm["command"]
