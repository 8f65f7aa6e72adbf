"""Finds which data sets a corpus needs in later stages, and whether this machine can get them."""

from collections.abc import Iterable
from pathlib import Path

from nanochat.common import UserError, rank, tr, warn
from nanochat.data.sources import net
from nanochat.data.sources.hub import endpoint
from tasks.mixtures import curriculum
from tasks.published import Published, carry_in

HUB_SECONDS = 10  # how long to wait for an answer from the hub


def whereabouts(sources: Iterable[Published]) -> dict[Published, str]:
    """Return the place from which this machine gets each data set.

    The place is "NANOCHAT_TASK_DIR", "cache", "hub", or "" if this machine cannot get the data set.
    The hub is asked once for each repository, and not again after it could not be reached.
    """
    places: dict[Published, str] = {}
    on_hub: dict[str, bool] = {}  # by repository
    reachable = True
    for source in sources:
        folder = source.local_folder()
        if folder is not None:  # load_table reads this folder and nothing else
            places[source] = "NANOCHAT_TASK_DIR" if source.files(folder) else ""
            continue
        if _is_cached(source):
            places[source] = "cache"
            continue
        if reachable and source.repo not in on_hub:
            try:
                on_hub[source.repo] = answers(f"{endpoint()}/api/datasets/{source.repo}")
            except OSError:
                reachable = False
            except UserError as proxy:  # it speaks SOCKS, as net.request() says
                warn(str(proxy))
                reachable = False
        places[source] = "hub" if on_hub.get(source.repo) else ""
    return places


def _is_cached(source: Published) -> bool:
    """Return whether the library `datasets` has this data set in its cache."""
    from datasets import config  # here, since the import takes a second or two

    repo = source.repo.replace("/", "___")
    folder = Path(config.HF_DATASETS_CACHE, repo, source.subset or "default")
    return any(folder.glob(f"**/*-{source.split}*.arrow"))


def answers(url: str) -> bool:
    """Return whether a server has a page at a URL.

    Raises OSError if the server cannot be reached, or if HF_HUB_OFFLINE forbids the request, and
    UserError as net.request() does.
    """
    from datasets import config

    if config.HF_HUB_OFFLINE:
        raise ConnectionError("HF_HUB_OFFLINE is set")
    # Not HEAD: an address may be signed for GET alone.
    headers = {"Range": "bytes=0-0"}
    with net.request("GET", url, headers=headers, timeout=HUB_SECONDS, stream=True) as response:
        return response.ok


def repos(corpus: str | None) -> dict[str, str]:
    """Return the place, as in whereabouts(), of each repository that a corpus's curriculum reads.

    The place is "" if this machine cannot get every part of the repository.
    """
    places: dict[str, str] = {}
    for source, place in whereabouts(curriculum(corpus).needs()).items():
        if places.get(source.repo) != "":  # "" if a part of the repository is missing
            places[source.repo] = place
    return places


def warn_of_missing(corpus: str) -> None:
    """Warn on rank 0 if this machine cannot get the data of later stages.

    A long stage calls this when it starts, so that there is time to get the data.
    """
    if rank() > 0:
        return
    missing = [repo for repo, place in repos(corpus).items() if not place]
    if missing:
        warn(
            tr(
                "later stages and evaluations read {repos}, which this machine cannot get. {how}. "
                "Do so before this stage ends; docs/offline.md has every command",
                repos=", ".join(missing),
                how=carry_in(missing),
            )
        )
