"""Makes report.md, report.html and report.json from the sections that the stages write.

python -m nanochat.report generate    # make the report of the stages that have run
python -m nanochat.report show        # print the summary table
python -m nanochat.report reset       # delete all sections, before a run from scratch
python -m nanochat.report compare ~/runs/english both=~/runs/chinese    # two base folders
python -m nanochat.report check       # train a golden run, to see whether this machine computes right
python -m nanochat.report check ~/.cache/nanochat/base_checkpoints/smoke    # judge a run
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nanochat.common import UserError, log, read_json, tr, write_atomic, write_json
from nanochat.data.command_line import run
from nanochat.report.check import main as check_run
from nanochat.report.compare import compare, load_run, named
from nanochat.report.curves import draw
from nanochat.report.html import page
from nanochat.report.markdown import cell, markdown
from nanochat.report.sections import current_sections, report_dir, trained_after
from nanochat.report.summary import (
    columns,
    environment,
    summary,
    table,
)
from nanochat.report.words import measure, total_cost
from nanochat.runtime.cost import read_stages, stages_file


def generate(key: str = "") -> Path:
    """Write report.md, report.html, report.json and the plots, and return the path of report.md.

    `key` names the run, for is_finished(). Raises UserError (exit code 2) if no stage has written a
    section yet.
    """
    folder = report_dir()
    sections = current_sections()
    costs = read_stages()
    # They are of an earlier run than the newest sections.
    if not costs.keys() & sections.keys() or trained_after(sections, stages_file()):
        costs = {}
    if not sections:
        raise UserError(
            tr(
                "there are no figures in {folder} yet; run a stage first, such as bash speedrun.sh",
                folder=folder,
            ),
            2,
        )
    report = {
        "key": key,
        "environment": environment(),
        "summary": summary(sections, costs),
        "table": table(sections),
        "stages": costs,
        "sections": sections,
    }
    pictures = {
        f"{name}.png": draw(name.replace("_", ": "), {name: section})
        for name, section in sections.items()
        if name.endswith("_train") and section.get("loss")
    }
    for file, picture in pictures.items():
        write_atomic(folder / file, picture)
    text = markdown(report, pictures)
    write_atomic(folder / "report.md", text)
    write_atomic(folder / "report.html", page(tr("nanochat report"), text, pictures))
    write_json(folder / "report.json", report)  # last: this file says that the report is complete
    return folder / "report.md"


def begin(key: str) -> None:
    """Record that `key` names the current run.

    The recorded costs of stages are deleted, unless `key` was recorded already.
    """
    path = report_dir() / "run.json"
    if not path.exists() or read_json(path)["key"] != key:
        stages_file().unlink(missing_ok=True)
        write_json(path, {"key": key})


def is_finished(key: str) -> bool:
    """Return whether report.json is the report of the run named `key`; False if `key` is empty."""
    path = report_dir() / "report.json"
    return bool(key) and path.exists() and read_json(path).get("key") == key


def show() -> None:
    """Print the summary table, and log the total costs of the run and the path of the report.

    Raises UserError (exit code 2) if there is no report yet.
    """
    from rich.console import Console
    from rich.table import Table

    path = report_dir() / "report.json"
    if not path.exists():
        raise UserError(
            tr(
                "there is no report in {folder} yet; make one with `python -m "
                "nanochat.report generate`",
                folder=report_dir(),
            ),
            2,
        )
    report = read_json(path)
    stages = columns(report["table"])
    grid = Table(tr("measure"), *(stage.upper() for stage in stages), title="nanochat")
    for name, row in report["table"].items():
        grid.add_row(measure(name), *(cell(row[stage]) if stage in row else "" for stage in stages))
    Console().print(grid)
    log(total_cost(report["summary"]))
    log(tr("report: {path}", path=report_dir() / "report.md"))


@dataclass(frozen=True)
class Config:
    """Make, show or delete the report."""

    verb: Annotated[
        Literal["generate", "show", "compare", "check", "reset", "begin", "finished"],
        tyro.conf.Positional,
    ] = "generate"
    """generate writes the report; show prints its summary table;
    compare puts several runs side by side;
    check says whether a run, or this machine, has the losses of a golden run;
    reset deletes the report and all sections; begin deletes the costs of runs other than --key;
    finished exits with 0 if run --key is finished, else with 3."""
    runs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """With compare: base folders or report.json files of two or more finished runs,
    each as PATH or NAME=PATH.
    With check: the checkpoint folder of a run; without one, this machine trains a golden run."""
    golden: str | None = None
    """With check: name of the golden run. default: d3, or the one that the run repeats"""
    price_per_hour: float | None = None
    """With compare: the price of an hour of the machine in any currency,
    to show what each run cost."""
    key: str = ""
    """Name of a run. generate keeps it in report.json,
    begin and finished compare it with the kept name."""


def main(cfg: Config) -> None:
    """Do what `cfg.verb` says.

    Raises UserError (exit code 2) if the number of named runs does not suit the verb, raises
    UserError (exit code 1) if the verb is "check" and the run computes wrong, and exits with code 3
    if the verb is "finished" and the run named `cfg.key` is not.
    """
    if cfg.runs and cfg.verb not in ("compare", "check"):
        raise UserError(
            tr(
                "{verb} takes no names of runs, got {runs}; leave them out",
                verb=cfg.verb,
                runs=", ".join(cfg.runs),
            ),
            2,
        )
    if cfg.verb == "generate":
        log(tr("report: {path}", path=generate(cfg.key)))
    elif cfg.verb == "show":
        show()
    elif cfg.verb == "compare":
        if len(cfg.runs) < 2:
            raise UserError(
                tr(
                    "compare needs two or more runs, as base folders or report.json files, "
                    "got {count}",
                    count=len(cfg.runs),
                ),
                2,
            )
        runs = named([load_run(word) for word in cfg.runs])
        log(
            tr(
                "comparison: {path}",
                path=compare(runs, report_dir() / "compare", cfg.price_per_hour),
            )
        )
    elif cfg.verb == "check":
        if len(cfg.runs) > 1:
            raise UserError(
                tr("check takes one run at a time, got {runs}", runs=", ".join(cfg.runs)), 2
            )
        check_run(Path(cfg.runs[0]).expanduser() if cfg.runs else None, cfg.golden)
    elif cfg.verb == "reset":
        shutil.rmtree(report_dir(), ignore_errors=True)
    elif cfg.verb == "begin":
        begin(cfg.key)
    elif not is_finished(cfg.key):
        raise SystemExit(3)


if __name__ == "__main__":
    run(main, Config, __doc__)
