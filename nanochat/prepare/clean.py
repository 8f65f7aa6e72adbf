"""Decide which documents of a corpus are left out of training.

On request, near-duplicates and documents that contain passages of evaluations are left out. The
shards stay as they are: corpus.json gets an entry `dropped`, and each shard gets a list of its
dropped documents in `dropped/`. Tokenising skips these documents, in this command and in every
stage.

First every shard is screened on its own, in processes that run `python -m nanochat.prepare.clean`
if the corpus is large. Then one process decides for all documents together.
"""

import contextlib
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from nanochat.common import (
    UserError,
    atomic_path,
    log,
    sha256_of,
    tr,
    warn,
    write_atomic,
    write_json,
)
from nanochat.data.corpora import DROPPED, Corpus, list_of_dropped, shards
from nanochat.data.shards import ABOUT, batches, check_sha256, count_rows, read_about
from nanochat.prepare.minhash import Signatures, near_duplicates, signatures
from nanochat.prepare.overlap import CHARACTERS, WORDS, Passages, read_passages
from nanochat.prepare.token_files import locked
from nanochat.prepare.workers import Message, Say, processes_for, serve, work
from nanochat.runtime.progress import Progress


def clean(
    corpus: Corpus,
    dedup: bool,
    check_against: Path | None,
    drop_contaminated: bool,
    processes: int | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """Screen a corpus, record which documents are left out, and return a dict with the counts.

    With `dedup`, documents that nearly equal an earlier one are left out; validation documents
    count as earlier than training documents. Documents that share a passage with an evaluation in
    the folder `check_against` are counted and, with `drop_contaminated`, left out. A call that only
    counts documents does not change what an earlier call left out. `data` is the value of --data in
    the command that leaves out the same documents again; by default it is the name of the corpus.

    Raises UserError if a shard is damaged. Raises UserError (exit code 2) if the folder of
    evaluations cannot be used, or if this call leaves out documents but would restore others that
    an earlier call left out with `dedup` or `drop_contaminated`.
    """
    passages = read_passages(check_against) if check_against is not None else None
    if passages is not None and passages.without:
        warn(
            tr(
                "{folder} has no text to look for in {names}, so documents with questions of "
                "these evaluations stay. Unpack archives: .parquet, .jsonl, .json, .csv and .tsv "
                "files are read, and texts of at least {words} words or {characters} Chinese "
                "characters are looked for.",
                folder=check_against,
                names=", ".join(passages.without),
                words=WORDS,
                characters=CHARACTERS,
            )
        )
    if dedup or drop_contaminated:
        earlier = read_about(corpus.folder).get(DROPPED, {})
        _refuse_to_take_back(earlier, dedup, drop_contaminated)
        if passages is not None:
            _refuse_other_evaluations(earlier, passages.names)
    paths = [path.absolute() for split in ("val", "train") for path in shards(corpus, split)]
    with locked(corpus.folder / ".clean.lock") as lock:
        result_paths = [corpus.folder / DROPPED / f".{path.stem}.npz" for path in paths]
        title = tr("screen {corpus}", corpus=corpus.name)
        with Progress(title, sum(map(count_rows, paths)), tr("documents")) as progress:
            total_bytes = sum(path.stat().st_size for path in paths)
            process_count = processes_for(total_bytes, len(paths), processes)
            if process_count < 2:
                for path, out in zip(paths, result_paths, strict=True):
                    screen_shard(path, out, dedup, passages, progress.advance)
            else:
                _screen_in_processes(
                    paths, result_paths, dedup, check_against, process_count, lock, progress
                )
        set_names = passages.names if passages else ()
        decision = _decide(result_paths, dedup, set_names, drop_contaminated)
        summary = decision.summary
        about = read_about(corpus.folder)
        dropped_earlier = about.get(DROPPED, {}).get("documents", 0)
        if dropped_earlier and not dedup and not drop_contaminated:
            _log_summary(corpus, summary)
            log(
                tr(
                    "{corpus}: {dropped_earlier:,} documents were left out earlier and still are",
                    corpus=corpus.name,
                    dropped_earlier=dropped_earlier,
                )
            )
        else:
            command = _command(data or corpus.name, dedup, check_against, drop_contaminated)
            summary = summary | {"make": command, "shards": _write_lists(paths, decision.dropped)}
            about[DROPPED] = summary
            write_json(corpus.folder / ABOUT, about)
            _log_summary(corpus, summary)
        for out in result_paths:
            out.unlink()
    return summary


def take_back(corpus: Corpus) -> None:
    """Restore all documents that were left out of a corpus."""
    about = read_about(corpus.folder)
    if about.pop(DROPPED, None) is not None:
        write_json(corpus.folder / ABOUT, about)
        for path in (corpus.folder / DROPPED).glob("*.npy"):
            path.unlink()
        log(tr("{name}: no document is left out any more", name=corpus.name))


def _refuse_to_take_back(
    earlier: dict[str, Any],
    dedup: bool,
    drop: bool,
) -> None:
    """Raise UserError (exit code 2) if `dedup` or `drop` is off now but left out documents earlier.

    This command would restore these documents. `earlier` is the entry `dropped` of corpus.json.
    """
    reasons = (
        ("near_duplicates", "--dedup", dedup),
        ("dropped_contaminated", "--drop_contaminated", drop),
    )
    for reason, flag, repeated in reasons:
        if earlier.get(reason) and not repeated:
            raise UserError(
                tr(
                    "an earlier command left out documents by {flag}, and this one would "
                    "take them back: it was {make}. Type its flags as well, or take all "
                    "documents back first with --all_documents",
                    flag=flag,
                    make=earlier["make"],
                ),
                exit_code=2,
            )


def _refuse_other_evaluations(earlier: dict[str, Any], set_names: tuple[str, ...]) -> None:
    """Raise UserError (exit code 2) if documents were left out for evaluations not in `set_names`.

    This command would restore these documents. `earlier` is the entry `dropped` of corpus.json.
    """
    if not earlier.get("dropped_contaminated"):
        return
    lacking = [
        name for name, hits in earlier["check_against"].items() if hits and name not in set_names
    ]
    if lacking:
        raise UserError(
            tr(
                "an earlier command left out documents that hold passages of {lacking}, which "
                "--check_against does not name now, so that this one would take them back: it was "
                "{make}. Name a folder with all evaluations, or take all documents back first "
                "with --all_documents",
                lacking=", ".join(lacking),
                make=earlier["make"],
            ),
            exit_code=2,
        )


def _command(
    data: str,
    dedup: bool,
    check_against: Path | None,
    drop_contaminated: bool,
) -> str:
    """Return the command line that leaves out the same documents again."""
    command = f"python -m nanochat.prepare --data {quote(data)}"
    if dedup:
        command += " --dedup"
    if check_against is not None:
        command += f" --check_against {quote(str(check_against))}"
    if drop_contaminated:
        command += " --drop_contaminated"
    return command


# --- the decision --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Decision:
    dropped: list[np.ndarray]  # for each shard, the indices of the documents to leave out
    summary: dict[str, Any]  # for corpus.json


def _decide(
    result_paths: list[Path],
    dedup: bool,
    set_names: tuple[str, ...],
    drop: bool,
) -> _Decision:
    """Return which documents to leave out, and a summary, given the results of all shards."""
    results = [dict(np.load(path)) for path in result_paths]
    counts = [int(result["seen"]) for result in results]
    ends = np.cumsum(counts)
    is_dropped = np.zeros(sum(counts), bool)
    summary: dict[str, Any] = {"of": sum(counts)}
    if dedup:
        by_shard = [Signatures(result["bands"], result["bins"]) for result in results]
        is_dropped |= near_duplicates(Signatures.joined(by_shard))
        summary["near_duplicates"] = int(is_dropped.sum())
    if set_names:
        hits = []  # (document, set), with the documents of all shards numbered in one sequence
        for result, first in zip(results, ends - counts, strict=True):
            hits.append(result["hits"] + [first, 0])
        documents, sets = np.concatenate(hits).T
        hits_by_set = np.bincount(sets, minlength=len(set_names)).tolist()
        summary["check_against"] = dict(zip(set_names, hits_by_set, strict=True))
        contaminated = np.unique(documents)
        summary["contaminated"] = len(contaminated)
        if drop:
            is_dropped[contaminated] = True
            summary["dropped_contaminated"] = True
    summary["documents"] = int(is_dropped.sum())
    dropped = [np.flatnonzero(shard_flags) for shard_flags in np.split(is_dropped, ends[:-1])]
    return _Decision(dropped, summary)


def _write_lists(paths: list[Path], dropped: list[np.ndarray]) -> dict[str, dict[str, Any]]:
    """Write each shard's list of left-out documents, and return corpus.json entries by shard."""
    entries = {}
    for path, numbers in zip(paths, dropped, strict=True):
        body = io.BytesIO()
        np.save(body, numbers)
        list_path = list_of_dropped(path)
        write_atomic(list_path, body.getvalue())
        entries[path.name] = {"documents": len(numbers), "sha256": sha256_of(list_path)}
    return entries


def _log_summary(corpus: Corpus, summary: dict[str, Any]) -> None:
    total = summary["of"]
    if "near_duplicates" in summary:
        count = summary["near_duplicates"]
        log(
            tr(
                "{name}: {count:,} of {total:,} documents ({count_2:.2%}) are "
                "near-duplicates and are left out",
                name=corpus.name,
                count=count,
                total=total,
                count_2=count / total,
            )
        )
    if "check_against" in summary:
        count = summary["contaminated"]
        by_set = [f"{name} {hits:,}" for name, hits in summary["check_against"].items()]
        figures = {"name": corpus.name, "count": count, "total": total, "sets": ", ".join(by_set)}
        if summary.get("dropped_contaminated"):
            log(
                tr(
                    "{name}: {count:,} of {total:,} documents hold a passage of an evaluation "
                    "({sets}) and are left out",
                    **figures,
                )
            )
        else:
            log(
                tr(
                    "{name}: {count:,} of {total:,} documents hold a passage of an evaluation "
                    "({sets}) and stay; --drop_contaminated leaves them out",
                    **figures,
                )
            )


# --- screening -----------------------------------------------------------------------------------


def screen_shard(
    path: Path,
    out: Path,
    dedup: bool,
    passages: Passages | None,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Screen a shard, write the results to `out`, and return a message for the parent process.

    The results are the number of documents, their signatures if `dedup` is set and, if `passages`
    are given, a pair (document index, evaluation index) for each evaluation that shares a passage
    with a document. The message has the "name" of the shard and its number of "documents".
    `advance` is called after every batch with the number of documents in it. Raises UserError if
    the shard is damaged.
    """
    check_sha256(path)
    batch_signatures = []
    hits: list[tuple[int, int]] = []
    documents_read = 0
    for texts in batches(path):
        if dedup:
            batch_signatures.append(signatures(texts))
        if passages is not None:
            for document, text in enumerate(texts, documents_read):
                hits += [(document, set_number) for set_number in passages.sets_in(text)]
        documents_read += len(texts)
        advance(len(texts))
    all_signatures = Signatures.joined(batch_signatures or [signatures([])])
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as temporary, open(temporary, "wb") as file:
        np.savez(
            file,
            bands=all_signatures.bands,
            bins=all_signatures.bins,
            hits=np.array(hits, np.int64).reshape(-1, 2),
            seen=documents_read,
        )
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "documents": documents_read}


def _screen_in_processes(
    paths: list[Path],
    result_paths: list[Path],
    dedup: bool,
    check_against: Path | None,
    processes: int,
    lock: int,
    progress: Progress,
) -> None:
    against = str(check_against.expanduser()) if check_against else ""
    setup = {"dedup": dedup, "against": against}
    tasks = []
    for path, out in zip(paths, result_paths, strict=True):
        tasks.append({"name": str(path), "out": str(out.absolute())})
    messages = work("nanochat.prepare.clean", setup, tasks, processes, keep=[lock])
    with contextlib.closing(messages):
        for _, message in messages:
            progress.advance(message.get("documents", 0))


def _begin_work(setup: Message) -> Callable[[Message, Say], Message]:
    """Read the evaluations, if any, and return the function with which a worker screens a shard."""
    passages = read_passages(Path(setup["against"])) if setup["against"] else None

    def screen(task: Message, say: Say) -> Message:
        def advance(documents: int) -> None:
            say({"documents": documents})

        return screen_shard(
            Path(task["name"]),
            Path(task["out"]),
            setup["dedup"],
            passages,
            advance,
        )

    return screen


if __name__ == "__main__":
    serve(_begin_work)
