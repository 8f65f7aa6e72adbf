"""Tokenise a corpus ahead of training, or check its tokens. Without this command, training
tokenises the corpus first.

python -m nanochat.prepare --data NAME --dedup    # leave out near-duplicates, here and in training
python -m nanochat.prepare --data NAME --dedup --check_against DIR --drop_contaminated
python -m nanochat.prepare --data NAME
python -m nanochat.prepare --data NAME --verify   # hash every token file again
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from nanochat.common import UserError, log, tr
from nanochat.data.command_line import run
from nanochat.data.mixing import resolve_data
from nanochat.prepare.clean import clean, take_back
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.token_files import open_tokens
from nanochat.tokenizer import Tokenizer, tokenizer_dir


@dataclass(frozen=True)
class Config:
    """The flags of `python -m nanochat.prepare`."""

    data: str | None = None
    """The corpus by name, or a mixture: web:0.7,books:0.3 tokenises both corpora.
    Default: the only corpus."""
    num_workers: Annotated[int | None, tyro.conf.arg(aliases=("-w",))] = None
    """How many processes to use, at most one per shard.
    Default: one per core, but fewer for a small corpus.
    Lower it if memory runs out."""
    dedup: bool = False
    """Leave out every document that nearly equals an earlier one, here and in training.
    Documents of validation count as the earlier ones."""
    check_against: str | None = None
    """A folder with copies of evaluations, such as NANOCHAT_TASK_DIR names.
    Counts the documents that hold a passage of an evaluation:
    13 words, or 50 Chinese characters."""
    drop_contaminated: bool = False
    """Also leave out the documents that --check_against finds."""
    all_documents: bool = False
    """Take back what --dedup and --drop_contaminated left out earlier."""
    verify: bool = False
    """Also read every token file again and compare its SHA-256 with the recorded one."""


def main(cfg: Config) -> None:
    """Clean or restore each corpus if the flags ask for it, then tokenise both of its splits.

    With --verify, all token files are also hashed again.
    """
    cleans = cfg.dedup or cfg.check_against is not None
    _check_flags(cfg, cleans)
    data = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(data.vocabulary))
    for corpus in data.corpora:
        if cleans:
            folder = Path(cfg.check_against) if cfg.check_against else None
            clean(corpus, cfg.dedup, folder, cfg.drop_contaminated, cfg.num_workers, data.name)
        elif cfg.all_documents:
            take_back(corpus)
        for split in ("train", "val"):
            tokens = prepare_documents(corpus, tokenizer, split, cfg.num_workers)
            if cfg.verify:
                open_tokens(tokens.folder, verify=True)
            checked = tr(", all intact") if cfg.verify else ""
            log(
                tr(
                    "{name} {split}: {documents:,} documents, {tokens:,} tokens{checked}",
                    name=corpus.name,
                    split=split,
                    documents=tokens.documents,
                    tokens=tokens.tokens,
                    checked=checked,
                )
            )


def _check_flags(cfg: Config, cleans: bool) -> None:
    """Raise UserError (exit code 2) if a flag is out of range or if flags contradict each other."""
    if cfg.num_workers is not None and cfg.num_workers < 1:
        raise UserError(
            tr("--num_workers must be at least 1, got {num_workers}", num_workers=cfg.num_workers),
            exit_code=2,
        )
    if cfg.drop_contaminated and cfg.check_against is None:
        raise UserError(
            tr("--drop_contaminated needs --check_against DIR, which says what to look for"),
            exit_code=2,
        )
    if cfg.all_documents and cleans:
        raise UserError(
            tr(
                "--all_documents keeps every document, so it goes without --dedup and "
                "--check_against"
            ),
            2,
        )


if __name__ == "__main__":
    run(main, Config, __doc__)
