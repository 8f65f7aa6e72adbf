"""What a published corpus is: a data set whose numbered parquet files become the shards of a corpus."""

from dataclasses import dataclass

from nanochat.common import UserError
from nanochat.data.shards import shard_name
from nanochat.data.sources.hub import Host, file_address

FIRST_IS_HELD_OUT = (
    99_999  # the shard's number where file 0 is for validation, since the last shard always is
)


@dataclass(frozen=True)
class Source:
    """A published corpus. A new one is a file that makes a Source, and a row in table.py."""

    name: str
    """The name of the corpus, for --data and for its folder."""
    title: str
    """The name for people."""
    repo: str
    """Owner and name on the Hugging Face hub."""
    path: str
    """The path of a file in the repository, with {number}."""
    files: int | None
    """How many files there are, numbered from 0; None if nobody has counted them, and then -n -1 is refused."""
    file_bytes: float
    """About how large a file is, for estimates before anything is fetched."""
    columns: tuple[str, ...]
    """The columns of the published files; a file without one of them is refused."""
    licence: str
    """The licence as the publisher names it."""
    modelscope: str | None = None
    """Owner and name on ModelScope, or None if no copy is known there."""

    @property
    def validation(self) -> int:
        """The number of the file that is held out: the last one, or the first if the last is not known."""
        return 0 if self.files is None else self.files - 1

    def numbers(self, count: int) -> list[int]:
        """The numbers of the first `count` files for training and of the validation file; -1 means all files.

        UserError (code 2) if there are not so many.
        """
        if self.files is None:
            if count < 1:
                raise UserError(
                    f"{self.title} needs at least 1 training file, and -1 for all is not possible because nobody has "
                    f"counted its files; got {count}. Type for example: -n 8",
                    2,
                )
            return [*range(1, count + 1), 0]
        most = self.files - 1
        if count < -1 or count == 0 or count > most:
            raise UserError(
                f"{self.title} has 1 to {most} training shards, or -1 for all, got {count}", 2
            )
        return [*range(most if count == -1 else count), most]

    def shard(self, number: int) -> str:
        """The name of the shard that a file becomes. The last shard of a corpus is for validation."""
        return shard_name(FIRST_IS_HELD_OUT if self.files is None and number == 0 else number)

    def url(self, number: int, host: Host = "hub") -> str:
        """The address of a file. UserError (code 2) if the host has no copy."""
        path = self.path.format(number=number)
        if host == "hub":
            return file_address(self.repo, path)
        if self.modelscope is None:
            raise UserError(
                f"no copy of {self.title} on ModelScope is known. Leave out --from modelscope; a mirror of the hub "
                "works too: HF_ENDPOINT=https://hf-mirror.com",
                2,
            )
        return file_address(self.modelscope, path, host)

    def listing(self, count: int, host: Host = "hub") -> list[str]:
        """The addresses of `numbers(count)`, for a program that fetches them on another machine.

        Where a shard has another name than its file, a second line says so in the way of aria2c: `  out=NAME`.
        """
        lines = []
        for number in self.numbers(count):
            url = self.url(number, host)
            lines.append(url)
            if url.rpartition("/")[2] != self.shard(number):
                lines.append(f"  out={self.shard(number)}")
        return lines

    def make(self, count: int, host: Host = "hub") -> str:
        """The command that fetches the corpus."""
        data = "" if self.name == "fineweb" else f"--data {self.name} "
        return f"python -m nanochat.dataset {data}-n {count}" + (
            " --from modelscope" if host == "modelscope" else ""
        )
