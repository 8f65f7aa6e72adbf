"""The published corpora that --data knows by name."""

from collections.abc import Mapping

from nanochat.data.sources import climbmix, fineweb_edu, fineweb_edu_chinese
from nanochat.data.sources.source import Source

SOURCES: Mapping[str, Source] = {
    source.name: source
    for source in (
        fineweb_edu.FINEWEB_EDU,
        climbmix.CLIMBMIX,
        fineweb_edu_chinese.SHUFFLED,
        fineweb_edu_chinese.V2_1,
        fineweb_edu_chinese.V2_2,
    )
}
