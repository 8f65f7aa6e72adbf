"""Tokenise a corpus ahead of training, or check its tokens. Without this command, training tokenises the corpus first.

python -m nanochat.prepare --data NAME
python -m nanochat.prepare --data NAME --verify   # read every token file again and compare its SHA-256
"""

from dataclasses import dataclass
from typing import Annotated

import tyro

from nanochat.common import UserError, log, run
from nanochat.data.mixing import resolve_data
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.token_files import open_tokens
from nanochat.tokenizer import Tokenizer, tokenizer_dir


@dataclass(frozen=True)
class Config:
    """Tokenise a corpus ahead of training, or check its tokens."""

    data: str | None = None
    """The corpus by name, or a mixture: web:0.7,books:0.3 tokenises both corpora. Default: the only corpus."""
    num_workers: Annotated[int | None, tyro.conf.arg(aliases=("-w",))] = None
    """How many processes to use, at most one per shard. Default: one per core, but fewer for a small corpus.
    Lower it if memory runs out."""
    verify: bool = False
    """Also read every token file again and compare its SHA-256 with the recorded one."""


def main(cfg: Config) -> None:
    """Tokenise or check both splits of each corpus."""
    if cfg.num_workers is not None and cfg.num_workers < 1:
        raise UserError(f"--num_workers must be at least 1, got {cfg.num_workers}", exit_code=2)
    data = resolve_data(cfg.data)
    tokenizer = Tokenizer.load(tokenizer_dir(data.vocabulary))
    for corpus in data.corpora:
        for split in ("train", "val"):
            tokens = prepare_documents(corpus, tokenizer, split, cfg.num_workers)
            if cfg.verify:
                open_tokens(tokens.folder, verify=True)
            checked = ", all intact" if cfg.verify else ""
            log(f"{corpus.name} {split}: {tokens.documents:,} documents, {tokens.tokens:,} tokens{checked}")


if __name__ == "__main__":
    run(main, Config, __doc__)
