"""Every test gets a base folder of its own, and in CI nothing that matters may be skipped."""

import functools
import os
import signal
import ssl
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported: processes that share two cores must not spin while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("NANOCHAT_LANG", None)
os.environ.setdefault("NANOCHAT_PEAK_TFLOPS", "1")  # measured, it would take half a second of each training
os.environ["LC_ALL"] = "C.UTF-8"  # tests read the English messages
# What tests compile is compiled once, and not into the user's own cache.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/nanochat-tests-{os.getuid()}")

# Each call of httpx.get() and its like would read some 140 certificates, which takes ten times as long as the request.
ssl.create_default_context = functools.cache(ssl.create_default_context)

# A shell starts background jobs with Ctrl-C ignored, which children would inherit: the tests that press it would hang.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MUST_RUN_IN_CI = ("browser", "contract", "npu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest begin first, since the others wait for the last test to end: minutes, if it is a whole pipeline.
    items.sort(key=lambda item: ("the_smoke_preset" not in item.name, item.get_closest_marker("smoke") is None))


def in_ci() -> bool:
    return os.environ.get("CI") == "true"


@pytest.fixture(autouse=True)
def base_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """NANOCHAT_BASE_DIR, empty: no test reads or writes the user's own data."""
    folder = tmp_path / "base"
    folder.mkdir()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(folder))
    return folder


def fail_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure that says why it was skipped."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: skipped, which in CI is a failure: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    must_run = any(item.get_closest_marker(name) for name in MUST_RUN_IN_CI)
    if in_ci() and must_run and report.skipped and not hasattr(report, "wasxfail"):
        fail_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    # A module skipped as a whole never says which markers its tests would have had.
    report = yield
    if in_ci() and report.skipped:
        fail_skipped(report)
    return report


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Ranks that are started once for all tests of a process."""
    from tests.support.ranks import Pool

    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a published model with real weights, converted once for all processes of a run: read only."""
    from tests.support.real_model import converted_once

    return converted_once(tmp_path_factory)


class Reliability:
    """Counts the fault tests of a run, over all processes, and writes docs/reliability.md from them at its end."""

    def __init__(self) -> None:
        from tests.support.reliability import Tally, faults

        self.known, self.make = faults(), Tally
        self.results: dict[str, Any] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        from tests.support.reliability import key_of

        key = key_of(report.nodeid)
        if key in self.known and (report.when == "call" or not report.passed):
            tally = self.results.setdefault(key, self.make())
            tally.ran += 1
            tally.failed += not report.passed

    def pytest_sessionfinish(self) -> None:
        from tests.support.reliability import write

        write(self.results)


def pytest_configure(config: pytest.Config) -> None:
    # Reports of all processes come together in the one that started them.
    if not hasattr(config, "workerinput") and (Path(__file__).parent / "support" / "reliability.py").exists():
        config.pluginmanager.register(Reliability())
