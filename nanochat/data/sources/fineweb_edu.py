"""FineWeb-Edu, shuffled: English pages that a classifier found instructive; upstream's corpus of 2025.

Checked: repository, file names, 1,823 files and the single column `text`, in the code of upstream nanochat.
"""

from nanochat.data.sources.source import Source

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
