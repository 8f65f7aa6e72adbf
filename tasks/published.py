"""Finds, reads and checks the rows of published data sets.

A task describes its data set as a Published, and reads the rows with load_table() or, if every
subject is a data set of its own, with load_subjects(). The rows come from a folder, from
NANOCHAT_TASK_DIR, or from the Hugging Face hub.
"""

import csv
import errno
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nanochat.common import UserError, base_dir, check_regular, log, rank, tr
from nanochat.data.library_words import in_words
from nanochat.data.parquet_footers import check_packing
from nanochat.data.sources.hub import endpoint, is_hub

# File ending -> builder of the library `datasets`, the best ending first. This module reads csv and
# tsv itself, so that every cell stays text.
_BUILDERS = {"parquet": "parquet", "jsonl": "json", "json": "json", "csv": "", "tsv": ""}


@dataclass(frozen=True)
class Published:
    """A split of a data set on the Hugging Face hub.

    In a copy of the hub's repository, the split is in the files `<split>*` (parquet, JSONL or JSON)
    of one of the folders `inside`, which are searched in this order, or in files that match one of
    `patterns`.
    """

    repo: str
    subset: str | None
    split: str
    inside: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    header: tuple[str, ...] = ()  # the columns of a tsv file, which has no line with their names
    # Whether the hub's main branch holds a program instead of data. Another branch then has the
    # output of the program as parquet files, in one folder for each subset.
    parquet_branch: bool = False

    @property
    def name(self) -> str:
        """The last part of the repository's name, which names its folder in NANOCHAT_TASK_DIR."""
        return self.repo.rpartition("/")[2]

    def local_folder(self) -> Path | None:
        """Return the folder in NANOCHAT_TASK_DIR that has a copy of the data set, or None."""
        task_dir = os.environ.get("NANOCHAT_TASK_DIR")
        if not task_dir:
            return None
        folder = Path(task_dir, self.name).expanduser()
        return folder if folder.is_dir() else None

    def files(self, folder: Path) -> list[Path]:
        """Return the files of the split below a folder, or [] if there are none.

        All are from the first entry of `inside`, or else of `patterns`, that has any. In `inside`,
        parquet is preferred to JSONL, and JSONL to JSON.
        """
        for name in self.inside:
            for ending, builder in _BUILDERS.items():
                if builder:
                    files = self._files_with_ending(folder / name, ending)
                    if files:
                        return files
        for pattern in self.patterns:
            files = sorted(folder.glob(pattern))
            if files:
                return files
        return []

    def _files_with_ending(self, folder: Path, ending: str) -> list[Path]:
        name = re.compile(rf"{re.escape(self.split)}([-_.].*)?\.{ending}")
        return sorted(path for path in folder.glob(f"*.{ending}") if name.fullmatch(path.name))

    def __str__(self) -> str:
        names = ", ".join(filter(None, (self.subset, self.split)))
        return f"{self.repo} ({names})"


def carry_in(repos: Sequence[str], branch: str = "") -> str:
    """Return two sentences on how to get data sets from the hub onto this machine.

    `branch` names the one that has their files, if it is not the main branch.
    """
    options = f"--repo-type dataset --revision {branch}" if branch else "--repo-type dataset"
    commands = []
    for repo in repos:
        folder = repo.rpartition("/")[2]
        commands.append(f"`hf download {repo} {options} --local-dir {folder}`")
    return tr(
        "Set HF_ENDPOINT to a mirror that this machine can reach. Or, on a machine with a network, "
        "run {commands}, copy what they fetch into a folder of this machine, and set "
        "NANOCHAT_TASK_DIR to that folder",
        commands=", ".join(commands),
    )


# --- tables --------------------------------------------------------------------------------------


class Table:
    """The rows of a data set in a seeded order, so that the first n rows are a random sample."""

    def __init__(
        self,
        rows: Any,
        source: str,
        seed: int = 42,
    ):
        self.source = source
        self._rows = rows
        self._order = np.random.default_rng(seed).permutation(len(rows))

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self._rows[self.number(i)]

    def number(self, i: int) -> int:
        """Return the position of row i in the published files, counted from 0."""
        return int(self._order[i])

    def in_published_order(self) -> list[int]:
        """Return the indices of this table's rows, in the order of the published files."""
        return sorted(range(len(self)), key=self.number)


def load_table(
    source: Published,
    columns: Sequence[str],
    folder: str | Path | None = None,
) -> Table:
    """Return the rows of a published data set.

    The rows come from `folder`, or else from NANOCHAT_TASK_DIR, or else from the Hugging Face hub.
    Raises UserError (exit code 2) if they cannot be read or lack one of `columns`.
    """
    rows_by_split, where = _open({source.split: source}, columns, folder)
    rows = rows_by_split[source.split]
    log(
        tr(
            "{name} {split}: {rows:,} rows from {where}",
            name=source.name,
            split=source.split,
            rows=len(rows),
            where=where,
        )
    )
    return Table(rows, where)


def load_subjects(
    sources: Mapping[str, Published],
    columns: Sequence[str],
    folder: str | Path | None = None,
) -> Table:
    """Return the rows of all subjects of a data set in one table, read as load_table() reads them.

    The column `subject` of each row names its subject.
    """
    rows_by_subject, where = _open(sources, columns, folder)
    rows = _Joined({subject: rows_by_subject[subject] for subject in sources})
    first_source = next(iter(sources.values()))
    log(
        tr(
            "{name} {split}: {rows:,} rows in {subjects} subjects from {where}",
            name=first_source.name,
            split=first_source.split,
            rows=len(rows),
            subjects=len(sources),
            where=where,
        )
    )
    return Table(rows, where)


class _Joined:
    """The rows of several subjects, one subject after another.

    Each row has its subject in the column `subject`. A row without a column `id` gets its position
    among the rows of the subject as its id.
    """

    def __init__(self, parts: Mapping[str, Any]):
        self._parts = [(subject, rows) for subject, rows in parts.items() if len(rows)]
        self._starts = np.cumsum([0] + [len(rows) for _, rows in self._parts]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> dict[str, Any]:
        part_index = bisect_right(self._starts, i) - 1
        subject, rows = self._parts[part_index]
        position = i - self._starts[part_index]
        return {"id": position, **rows[position], "subject": subject}


# --- reading -------------------------------------------------------------------------------------


def _open(
    sources: Mapping[str, Published],
    columns: Sequence[str],
    folder: str | Path | None,
) -> tuple[dict[str, Any], str]:
    """Return the rows of several splits, by key, and a description of where they came from.

    Raises UserError as load_table() does.
    """
    first_source = next(iter(sources.values()))
    source_folder = Path(folder).expanduser() if folder is not None else first_source.local_folder()
    if source_folder is None:
        rows, where = _from_hub(sources)
    else:
        rows, where = _from_folder(sources, columns, source_folder)
    for key, source in sources.items():
        place_of_rows = where if len(sources) == 1 else f"{where} ({key})"
        _check_columns(rows[key].column_names, columns, place_of_rows, source)
    return rows, where


def _from_hub(sources: Mapping[str, Published]) -> tuple[dict[str, Any], str]:
    token = None if is_hub(endpoint()) else False  # None stands for HF_TOKEN or the stored token
    rows = {}
    for key, source in sources.items():
        arguments: list[str | None] = [source.repo]
        options: dict[str, Any] = {"split": source.split, "token": token}
        branch = "refs/convert/parquet" if source.parquet_branch else ""
        if branch:
            options["data_dir"] = source.subset
            options["revision"] = branch
        else:
            arguments.append(source.subset)
        advice = carry_in([source.repo], branch)
        rows[key] = _load_dataset(str(source), *arguments, advice=advice, **options)
    first_source = next(iter(sources.values()))
    return rows, str(first_source) if len(sources) == 1 else first_source.repo


def _from_folder(
    sources: Mapping[str, Published],
    columns: Sequence[str],
    folder: Path,
) -> tuple[dict[str, Any], str]:
    files = {key: source.files(folder) for key, source in sources.items()}
    for key, source in sources.items():
        if not files[key]:
            raise _no_rows(source, folder)
    all_files = [path for paths in files.values() for path in paths]
    _check_files(all_files)
    where = str(all_files[0].parent if len(sources) == 1 else folder)
    builder = _BUILDERS[all_files[0].suffix[1:]]
    if not builder:
        return {key: _Cells(paths, sources[key].header) for key, paths in files.items()}, where
    if len(sources) > 1:
        if builder != "parquet":  # one after the other
            rows = {}
            for key, source in sources.items():
                alone, _ = _from_folder({key: source}, columns, folder)
                rows[key] = alone[key]
            return rows, where
        # Read together, a parquet file that lacks a column would get empty cells.
        for key, paths in files.items():
            for path in paths:
                _check_columns(pq.read_schema(path).names, columns, str(path), sources[key])
    data_files = {key: [str(path) for path in paths] for key, paths in files.items()}
    rows = _load_dataset(
        where,
        builder,
        data_files=data_files,
        cache_dir=str(base_dir() / "task_cache"),
        advice=tr("Copy the files again from their source"),
    )
    return rows, where


def _no_rows(source: Published, folder: Path) -> UserError:
    patterns = [f"{name}/{source.split}*.parquet|jsonl" for name in source.inside]
    patterns += source.patterns
    paths = tr(" or ").join(str(folder / pattern) for pattern in patterns)
    return UserError(
        tr(
            "there are no rows of {name} ({split}) in {folder}: looked for {paths}. Copy "
            "one of these files there, or name another folder",
            name=source.name,
            split=source.split,
            folder=folder,
            paths=paths,
        ),
        exit_code=2,
    )


def _check_columns(
    names: Sequence[str],
    columns: Sequence[str],
    where: str,
    source: Published,
) -> None:
    missing = [column for column in columns if column not in names]
    if missing:
        raise UserError(
            tr(
                "{where} lacks the columns {missing}; it has {names}. Use the published "
                "files of {repo}",
                where=where,
                missing=missing,
                names=list(names),
                repo=source.repo,
            ),
            exit_code=2,
        )


def _check_files(files: Sequence[Path]) -> None:
    """Raise UserError (exit code 2) if a file cannot be read, or would fill the memory."""
    for path in files:
        try:
            check_regular(path, max_bytes=path.stat().st_size)
            if path.suffix == ".parquet":
                check_packing(path)
        except (OSError, ValueError) as failure:
            raise UserError(
                tr(
                    "{path} cannot be read: {failure}. Copy the file again from its source",
                    path=path,
                    failure=in_words(failure),
                ),
                2,
            ) from failure


def _load_dataset(where: str, *arguments: Any, advice: str, **options: Any) -> Any:
    """Return the data set that `datasets.load_dataset` loads.

    Raises UserError (exit code 2) with one message for its many kinds of failure, or OSError if the
    disk is full.
    """
    # Imported here, since the import takes a second or two and only tasks with rows need it.
    import datasets
    import datasets.exceptions

    if rank() > 0 or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(*arguments, **options)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as failure:
        cause = failure.__cause__ or failure
        if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
            raise cause from None
        text = tr(
            "{where} cannot be read: {cause}. {advice}",
            where=where,
            cause=cause,
            advice=advice,
        )
        raise UserError(text, exit_code=2) from failure


class _Cells(list[dict[str, Any]]):
    """The rows of csv or tsv files, in which every cell stays text, such as 1.50, 01 or None."""

    def __init__(self, files: Sequence[Path], header: Sequence[str]):
        super().__init__()
        self.column_names = list(header)
        for path in files:
            try:
                self._read(path, header)
            except (csv.Error, ValueError) as broken:
                text = tr(
                    "{path} cannot be read: {failure}. Copy the file again from its source",
                    path=path,
                    failure=in_words(broken),
                )
                raise UserError(text, exit_code=2) from broken

    def _read(self, path: Path, header: Sequence[str]) -> None:
        with open(path, encoding="utf-8-sig", newline="") as file:
            if path.suffix == ".tsv":
                reader = csv.DictReader(
                    file,
                    header or None,
                    delimiter="\t",
                    quoting=csv.QUOTE_NONE,
                    strict=True,
                )
            else:
                reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise ValueError(
                        tr(
                            "line {line_num} has not as many cells as there are columns",
                            line_num=reader.line_num,
                        )
                    )
                self.append(row)
            self.column_names = list(reader.fieldnames or ())
