"""Which data sets the stages and evaluations of a corpus read, and whether this machine can get them."""

import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from nanochat.common import rank, tr, warn
from nanochat.data.sources.hub import endpoint
from tasks.common import Published, carry_in
from tasks.mixtures import curriculum

HUB_SECONDS = 10  # how long to wait for an answer of the hub


def whereabouts(sources: Iterable[Published]) -> dict[Published, str]:
    """Where each data set is: "NANOCHAT_TASK_DIR", "cache", "hub", or "" if this machine cannot get it.

    The hub is asked once for each repository, and not again after it could not be reached at all.
    """
    found: dict[Published, str] = {}
    asked: dict[str, bool] = {}
    reachable = True
    for source in sources:
        folder = source.local_folder()
        if folder is not None:  # load_table reads this folder and nothing else
            found[source] = "NANOCHAT_TASK_DIR" if source.files(folder) else ""
        elif _is_cached(source):
            found[source] = "cache"
        else:
            if reachable and source.repo not in asked:
                try:
                    asked[source.repo] = answers(f"{endpoint()}/api/datasets/{source.repo}")
                except OSError:
                    reachable = False
            found[source] = "hub" if asked.get(source.repo) else ""
    return found


def _is_cached(source: Published) -> bool:
    """Whether the library `datasets` has read this data set before."""
    from datasets import config  # here, since the import takes a second or two

    folder = Path(
        config.HF_DATASETS_CACHE, source.repo.replace("/", "___"), source.subset or "default"
    )
    return any(folder.glob(f"**/*-{source.split}*.arrow"))


def answers(url: str) -> bool:
    """Whether a server has a page; OSError if the server cannot be reached, or if HF_HUB_OFFLINE forbids to ask."""
    from datasets import config

    if config.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    request = urllib.request.Request(url, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return True
    except urllib.error.HTTPError:
        return False


def repos(corpus: str | None) -> dict[str, str]:
    """Where this machine gets each repository that the curriculum of a corpus reads; "" if it cannot get all of it."""
    found: dict[str, str] = {}
    for source, place in whereabouts(curriculum(corpus).needs()).items():
        found[source.repo] = found.get(source.repo, place) and place
    return found


def warn_of_missing(corpus: str) -> None:
    """A warning on rank 0, at the start of a long stage, if later stages will lack data."""
    gone = [repo for repo, place in repos(corpus).items() if not place] if rank() == 0 else []
    if gone:
        warn(
            tr(
                "later stages and evaluations read {repos}, which this machine cannot get. {how}. Do so before this "
                "stage ends; docs/offline.md has every command",
                repos=", ".join(gone),
                how=carry_in(gone),
            )
        )
