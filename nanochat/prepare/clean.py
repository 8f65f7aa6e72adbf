"""Says which documents of a corpus are left out: near-duplicates, and documents with passages of evaluations.

The shards stay as they are. corpus.json gets an entry `dropped`, and each shard a list of its documents in `dropped/`;
tokenising leaves these documents out, in this command and in every stage.
"""

import contextlib
import io
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from nanochat.common import UserError, log, sha256_of, write_atomic, write_json
from nanochat.data.corpora import DROPPED, Corpus, list_of_dropped, shards
from nanochat.data.shards import ABOUT, count_rows, read_about
from nanochat.prepare import screen
from nanochat.prepare.minhash import Signatures, near_duplicates
from nanochat.prepare.overlap import read_passages
from nanochat.prepare.token_files import locked
from nanochat.prepare.workers import processes_for, work
from nanochat.runtime.progress import Progress


def clean(
    corpus: Corpus,
    dedup: bool,
    check_against: Path | None,
    drop_contaminated: bool,
    processes: int | None = None,
) -> dict[str, Any]:
    """Screen all documents of a corpus, note which are left out, and return what corpus.json says about them.

    Of documents that resemble each other the first stays; validation comes first, so training keeps no near copy of a
    validation document. The result depends on the shards alone, not on the processes. A call that only counts
    keeps what was left out earlier. UserError if a shard is damaged, or with code 2 if the call would take documents
    back that an earlier one left out for a reason that this one does not repeat.
    """
    if dedup or drop_contaminated:
        _refuse_to_take_back(read_about(corpus.folder).get(DROPPED, {}), dedup, drop_contaminated)
    against = read_passages(check_against) if check_against is not None else None
    paths = [path.absolute() for split in ("val", "train") for path in shards(corpus, split)]
    folder = corpus.folder / DROPPED
    with locked(corpus.folder / ".clean.lock") as lock:
        outs = [folder / f".{path.stem}.npz" for path in paths]
        with Progress(
            f"screen {corpus.name}", sum(map(count_rows, paths)), "documents"
        ) as progress:
            count = processes_for(sum(path.stat().st_size for path in paths), len(paths), processes)
            if count < 2:
                for path, out in zip(paths, outs, strict=True):
                    screen.screen_shard(path, out, dedup, against, progress.advance)
            else:
                setup = {
                    "dedup": dedup,
                    "against": str(check_against.expanduser()) if check_against else "",
                }
                tasks = [
                    {"name": str(p), "out": str(out.absolute())}
                    for p, out in zip(paths, outs, strict=True)
                ]
                messages = work("nanochat.prepare.screen", setup, tasks, count, keep=[lock])
                with contextlib.closing(messages):
                    for _, message in messages:
                        progress.advance(message.get("documents", 0))
        found = _decide(outs, dedup, against.names if against else (), drop_contaminated)
        summary = found.pop("summary")
        about = read_about(corpus.folder)
        earlier = about.get(DROPPED, {}).get("documents", 0)
        if earlier and not dedup and not drop_contaminated:
            for out in outs:
                out.unlink()
            _tell(corpus, summary)
            log(f"{corpus.name}: {earlier:,} documents were left out earlier and still are")
            return summary
        make = f"python -m nanochat.prepare --data {quote(corpus.name)}" + " --dedup" * dedup
        make += f" --check_against {quote(str(check_against))}" if against is not None else ""
        make += " --drop_contaminated" * drop_contaminated
        about[DROPPED] = summary | {"make": make, "shards": {}}
        for path, out in zip(paths, outs, strict=True):
            body = io.BytesIO()
            np.save(body, found[out.name])
            write_atomic(list_of_dropped(path), body.getvalue())
            about[DROPPED]["shards"][path.name] = {
                "documents": len(found[out.name]),
                "sha256": sha256_of(list_of_dropped(path)),
            }
            out.unlink()
        write_json(corpus.folder / ABOUT, about)
    _tell(corpus, about[DROPPED])
    return about[DROPPED]


def _refuse_to_take_back(earlier: dict[str, Any], dedup: bool, drop: bool) -> None:
    """Raise UserError if an earlier command left out documents for a reason that this one does not repeat."""
    repeated = {
        "near_duplicates": ("--dedup", dedup),
        "dropped_contaminated": ("--drop_contaminated", drop),
    }
    for reason, (flag, given) in repeated.items():
        if not earlier.get(reason) or given:
            continue
        raise UserError(
            f"an earlier command left out documents by {flag}, and this one would take them back: it was "
            f"{earlier['make']}. Type its flags as well, or take all documents back first with --all_documents",
            exit_code=2,
        )


def _decide(outs: list[Path], dedup: bool, names: tuple[str, ...], drop: bool) -> dict[str, Any]:
    """The numbers of the documents to leave out by screened file, and a summary."""
    screened = [dict(np.load(out)) for out in outs]
    counts = [int(one["seen"]) for one in screened]
    ends = np.cumsum(counts)
    gone = np.zeros(sum(counts), bool)
    summary: dict[str, Any] = {"of": sum(counts)}
    if dedup:
        gone |= near_duplicates(
            Signatures.joined([Signatures(one["bands"], one["bins"]) for one in screened])
        )
        summary["near_duplicates"] = int(gone.sum())
    if names:
        hits = np.concatenate(
            [
                one["hits"] + [end - count, 0]
                for one, end, count in zip(screened, ends, counts, strict=True)
            ]
        )
        summary["check_against"] = {
            name: int((hits[:, 1] == number).sum()) for number, name in enumerate(names)
        }
        held = np.unique(hits[:, 0])
        summary["contaminated"] = len(held)
        if drop:
            gone[held] = True
            summary["dropped_contaminated"] = True
    summary["documents"] = int(gone.sum())
    parts = np.split(gone, ends[:-1])
    return {out.name: np.flatnonzero(part) for out, part in zip(outs, parts, strict=True)} | {
        "summary": summary
    }


def _tell(corpus: Corpus, dropped: dict[str, Any]) -> None:
    of = dropped["of"]
    if "near_duplicates" in dropped:
        some = dropped["near_duplicates"]
        log(
            f"{corpus.name}: {some:,} of {of:,} documents ({some / of:.2%}) are near-duplicates and are left out"
        )
    if "check_against" in dropped:
        some = dropped["contaminated"]
        each = ", ".join(f"{name} {count:,}" for name, count in dropped["check_against"].items())
        fate = (
            "are left out"
            if dropped.get("dropped_contaminated")
            else "stay; --drop_contaminated leaves them out"
        )
        log(
            f"{corpus.name}: {some:,} of {of:,} documents hold a passage of an evaluation ({each}) and {fate}"
        )


def take_back(corpus: Corpus) -> None:
    """Leave out no document of a corpus any more."""
    about = read_about(corpus.folder)
    if about.pop(DROPPED, None) is not None:
        write_json(corpus.folder / ABOUT, about)
        for path in (corpus.folder / DROPPED).glob("*.npy"):
            path.unlink()
        log(f"{corpus.name}: no document is left out any more")
