"""Fineweb-Edu-Chinese: Chinese pages that a classifier found instructive, shuffled or as OpenCSG publishes them.

Checked in the data card and in programs that read the sets: V2.1 and V2.2 have the folder `4_5` for the best pages,
with files 000000.parquet, 000001.parquet and so on and the columns text, score and source. Readers of V2.2 count 9,745
and 9,767 files there, so the code relies on no count. V2.1's card gives 70 GB, 17,790,513 documents and 46 billion
tokens for the folder and an Apache 2.0 tag, and asks for permission by mail before commercial use. Neighbouring files
come from the same collection (the first from CCI3), so a few of them are no fair sample.

The shuffled set says that it is V2.1 in the shards of upstream's script. Its file names and its column follow from that
script; how many files it has and how large they are has not been checked here. V2.2 has been read as asking for
approval, which was not checked either.
"""

from nanochat.data.sources.source import Source

_LICENCE = "Apache 2.0; commercial use with OpenCSG's permission"
_PUBLISHED = ("text", "score", "source")
_FILE_BYTES = 7.2e6  # 70 GB in about 9,745 files

SHUFFLED = Source(
    name="fineweb-zh",
    title="Fineweb-Edu-Chinese V2.1, shuffled",
    repo="grimlee/fineweb-edu-Chinese-v2.1-shuffle",
    path="shard_{number:05d}.parquet",
    files=None,
    file_bytes=300e6,  # generous: the script packs 250 million characters into a file
    columns=("text",),
    licence=_LICENCE,
)
V2_1 = Source(
    name="fineweb-zh-v2.1",
    title="Fineweb-Edu-Chinese V2.1",
    repo="opencsg/Fineweb-Edu-Chinese-V2.1",
    path="4_5/{number:06d}.parquet",
    files=None,
    file_bytes=_FILE_BYTES,
    columns=_PUBLISHED,
    licence=_LICENCE,
    modelscope="opencsg/Fineweb-Edu-Chinese-V2.1",
)
V2_2 = Source(
    name="fineweb-zh-v2.2",
    title="Fineweb-Edu-Chinese V2.2",
    repo="opencsg/Fineweb-Edu-Chinese-V2.2",
    path="4_5/{number:06d}.parquet",
    files=None,
    file_bytes=_FILE_BYTES,
    columns=_PUBLISHED,
    licence=_LICENCE,
    modelscope="opencsg/Fineweb-Edu-Chinese-V2.2",
)
