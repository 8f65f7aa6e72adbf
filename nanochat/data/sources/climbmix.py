"""ClimbMix, shuffled: English pages weighted by topic; upstream's corpus of 2026, and its fastest way to GPT-2.

Checked: repository, file names, 6,543 files (the last, 6,542, for validation) and the column `text`, in upstream's code
and in other programs that read the set. The licence is that of the original ClimbMix, of which this is a copy.
"""

from nanochat.data.sources.source import Source

CLIMBMIX = Source(
    name="climbmix",
    title="ClimbMix",
    repo="karpathy/climbmix-400b-shuffle",
    path="shard_{number:05d}.parquet",
    files=6_543,
    file_bytes=100e6,
    columns=("text",),
    licence="CC BY-NC 4.0, not for commercial use",
)
