"""The published corpora that --data knows by name.

The numbered parquet files of a published data set become the shards of a corpus. To add a corpus,
add a Source to SOURCES at the end.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nanochat.common import UserError, tr
from nanochat.data.shards import shard_name
from nanochat.data.sources.hub import Host, file_address

# The index of the shard that file 0 becomes if it is held out: the last shard is for validation.
FIRST_IS_HELD_OUT = 99_999


@dataclass(frozen=True)
class Source:
    """A published corpus."""

    name: str
    """The name of the corpus, for --data and for its folder."""
    title: str
    """The name of the data set in messages."""
    repo: str
    """Owner and name on the Hugging Face hub."""
    path: str
    """The path of a file in the repository, with {number} for the index of the file."""
    files: int | None
    """The number of files, or None if it is unknown; -n -1 is then refused."""
    file_bytes: float
    """The approximate size of a file, for estimates before anything is fetched."""
    columns: tuple[str, ...]
    """The columns of the published files; a file without one of them is refused."""
    licence: str
    """The licence as the publisher names it."""
    commercial: bool = True
    """Whether the licence allows commercial use."""
    modelscope: str | None = None
    """Owner and name on ModelScope, or None if no copy is known there."""

    @property
    def validation(self) -> int:
        """The index of the file that is held out for validation.

        This is the last file, or file 0 if the number of files is unknown.
        """
        return 0 if self.files is None else self.files - 1

    def numbers(self, count: int) -> list[int]:
        """Return the indices of the first `count` training files and of the validation file.

        A `count` of -1 means all training files, if their number is known. Raises UserError (exit
        code 2) if `count` is out of range.
        """
        if self.files is None:
            if count < 1:
                raise UserError(
                    tr(
                        "{title} needs at least 1 training file, and -1 for all is not "
                        "possible because nobody has counted its files; got {count}. Type "
                        "for example: -n 8",
                        title=self.title,
                        count=count,
                    ),
                    2,
                )
            return [*range(1, count + 1), 0]
        training_files = self.files - 1
        if count < -1 or count == 0 or count > training_files:
            raise UserError(
                tr(
                    "{title} has 1 to {training_files} training shards, or -1 for all, got {count}",
                    title=self.title,
                    training_files=training_files,
                    count=count,
                ),
                2,
            )
        if count == -1:
            count = training_files
        return [*range(count), training_files]

    def shard(self, number: int) -> str:
        """Return the name of the shard that file `number` becomes.

        The validation file becomes the last shard, even if it is the first file.
        """
        is_held_out_first = self.files is None and number == 0
        return shard_name(FIRST_IS_HELD_OUT if is_held_out_first else number)

    def url(self, number: int, host: Host = "hub") -> str:
        """Return the address of file `number`.

        Raises UserError (exit code 2) if no copy on `host` is known.
        """
        path = self.path.format(number=number)
        if host == "hub":
            return file_address(self.repo, path)
        if self.modelscope is None:
            raise UserError(
                tr(
                    "no copy of {title} on ModelScope is known. Leave out --from modelscope; "
                    "a mirror of the hub works too: HF_ENDPOINT=https://hf-mirror.com",
                    title=self.title,
                ),
                2,
            )
        return file_address(self.modelscope, path, host)

    def listing(self, count: int, host: Host = "hub") -> list[str]:
        """Return lines for aria2c: the addresses of `count` training files and the validation file.

        If a shard has another name than its file, an indented line `out=NAME` follows the address.
        Raises UserError (exit code 2) if `count` is out of range or no copy on `host` is known.
        """
        lines = []
        for number in self.numbers(count):
            url = self.url(number, host)
            lines.append(url)
            if url.rpartition("/")[2] != self.shard(number):
                lines.append(f"  out={self.shard(number)}")
        return lines

    def make(self, count: int, host: Host = "hub") -> str:
        """Return the command that fetches the corpus with `count` training files from `host`."""
        data = "" if self.name == "fineweb" else f"--data {self.name} "
        origin = " --from modelscope" if host == "modelscope" else ""
        return f"python -m nanochat.dataset {data}-n {count}{origin}"


# English pages that a classifier found instructive, shuffled; upstream's corpus of 2025.
# Checked in the code of upstream nanochat: repository, file names, 1,823 files and the single
# column `text`.
FINEWEB_EDU = Source(
    name="fineweb",
    title="FineWeb-Edu",
    repo="karpathy/fineweb-edu-100b-shuffle",
    path="shard_{number:05d}.parquet",
    files=1_823,
    file_bytes=100e6,
    columns=("text",),
    licence="ODC-By 1.0",
)

# English pages weighted by topic, shuffled; upstream's corpus of 2026, and its fastest way to
# GPT-2. Checked in upstream's code and in other programs that read the set: repository, file names,
# 6,543 files (the last, 6,542, for validation) and the column `text`. The set is a copy of the
# original ClimbMix, and the licence is the original's.
CLIMBMIX = Source(
    name="climbmix",
    title="ClimbMix",
    repo="karpathy/climbmix-400b-shuffle",
    path="shard_{number:05d}.parquet",
    files=6_543,
    file_bytes=100e6,
    columns=("text",),
    licence="CC BY-NC 4.0",
    commercial=False,
)

# Fineweb-Edu-Chinese: Chinese pages that a classifier found instructive, shuffled or as OpenCSG
# publishes them.
#
# Checked in the data card and in programs that read the sets: V2.1 and V2.2 have the folder `4_5`
# for the best pages, with files 000000.parquet, 000001.parquet and so on and the columns text,
# score and source. Readers of V2.2 count 9,745 and 9,767 files there, so the code relies on no
# count. V2.1's card gives 70 GB, 17,790,513 documents and 46 billion tokens for the folder and an
# Apache 2.0 tag, and asks for permission by mail before commercial use. Neighbouring files come
# from the same collection (the first from CCI3), so a few of them are not a fair sample.
#
# The shuffled set is, by its own account, V2.1 in the shards of upstream's script. Its file names
# and its column follow from that script; how many files it has and how large they are has not been
# checked here. V2.2 has been read as asking for approval, which was not checked either.
_CHINESE_LICENCE = "Apache 2.0; commercial use with OpenCSG's permission"
_CHINESE_COLUMNS = ("text", "score", "source")
_CHINESE_FILE_BYTES = 7.2e6  # 70 GB in about 9,745 files

CHINESE_SHUFFLED = Source(
    name="fineweb-zh",
    title="Fineweb-Edu-Chinese V2.1, shuffled",
    repo="grimlee/fineweb-edu-Chinese-v2.1-shuffle",
    path="shard_{number:05d}.parquet",
    files=None,
    file_bytes=300e6,  # generous: the script packs 250 million characters into a file
    columns=("text",),
    licence=_CHINESE_LICENCE,
)
CHINESE_V2_1 = Source(
    name="fineweb-zh-v2.1",
    title="Fineweb-Edu-Chinese V2.1",
    repo="opencsg/Fineweb-Edu-Chinese-V2.1",
    path="4_5/{number:06d}.parquet",
    files=None,
    file_bytes=_CHINESE_FILE_BYTES,
    columns=_CHINESE_COLUMNS,
    licence=_CHINESE_LICENCE,
    modelscope="opencsg/Fineweb-Edu-Chinese-V2.1",
)
CHINESE_V2_2 = Source(
    name="fineweb-zh-v2.2",
    title="Fineweb-Edu-Chinese V2.2",
    repo="opencsg/Fineweb-Edu-Chinese-V2.2",
    path="4_5/{number:06d}.parquet",
    files=None,
    file_bytes=_CHINESE_FILE_BYTES,
    columns=_CHINESE_COLUMNS,
    licence=_CHINESE_LICENCE,
    modelscope="opencsg/Fineweb-Edu-Chinese-V2.2",
)

SOURCES: Mapping[str, Source] = {
    source.name: source
    for source in (FINEWEB_EDU, CLIMBMIX, CHINESE_SHUFFLED, CHINESE_V2_1, CHINESE_V2_2)
}
