"""Gives the rates of each kind of card: its speed at matmuls, memory, links and operator launches.

Peak speeds and memory sizes come from the table of each platform. For each chip, this module adds
the bandwidths of memory and links from data sheets, and the shares of them that others have
measured on such cards. `python check_npu.py --bench` measures the rates of your own cards, and
calibration.py reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from nanochat.platforms.base import Chip

# The one constant that was fitted to training runs: the speed of a model's matmuls relative to a
# matmul of the shape that suits the card best. published.py compares predictions with the runs.
SHAPES = 0.82
# An estimate based on FlashAttention-3 on an H100 (arXiv 2407.08608): causal, heads of 128, 2,048
# tokens, both directions.
ATTENTION = 0.4  # share of the peak
# Measured on a 910B (github.com/gameofdimension/limulidae): exp over a large tensor moves 2 x 642
# GB/s of 1.6 TB/s.
VECTOR = 0.8  # share of the memory's bandwidth
# Measured there with eight cards: all_reduce 126 GB/s and all_gather 130 GB/s a card, of 196 GB/s.
LINK = 0.65  # share of a link's bandwidth in each direction
FULL = 0.25  # speed of fp32 matmuls relative to 16 bits; 87 and 328 TFLOP/s on that 910B
# FLOP/s of the best fp8 matmul on an H100, from the table Maximum Achievable Matmul FLOPS, as below.
EIGHT_BITS = 1402.6e12
LAUNCH_SECONDS = 12e-6  # host time to launch an operator; assumed, as no figure was published


@dataclass(frozen=True)
class Rating:
    """A card's bandwidths in bytes per second (links: per direction), and its best matmul speed."""

    memory: float
    link: float  # to the cards of its server
    network: float  # to other servers
    server: int  # number of cards in a server
    best: float  # the share of the peak that the best shape of a matmul reaches


# Best shapes: 328 TFLOP/s of 376 on a 910B (limulidae, as above); A100 and H100 by the table
# Maximum Achievable Matmul FLOPS (github.com/stas00/ml-engineering, compute/accelerator); for the
# 910A the middle of that table. The 910C's links: arXiv 2506.12708. The memory of the 910A and the
# 910B4, and the networks of NPUs, are estimates from product pages. GPUs are those of SXM servers
# (HGX, DGX), after the vendor's data sheets: NVLink 3 moves 600 GB/s in both directions together
# (A100), NVLink 4 900 GB/s (H100, H200). Between servers each GPU has a network card of its own:
# 200 Gb/s in a DGX A100, 400 Gb/s in a DGX H100 or H200. PCIe cards have slower links, which these
# rows do not describe. A chip without a row here, such as the 950, is not rated: it is planned by
# its memory alone.
SECOND = Rating(1.6e12, 196e9, 25e9, 8, 0.87)
RATINGS: Mapping[str, Rating] = MappingProxyType(
    {
        "910A": Rating(1.2e12, 30e9, 12.5e9, 8, 0.80),
        "910B1": SECOND,
        "910B2": SECOND,
        "910B2C": SECOND,
        "910B3": SECOND,
        "910B4": replace(SECOND, memory=0.8e12),
        "910B4-1": SECOND,
        "910C": replace(SECOND, server=16),
        "A100": Rating(2.0e12, 300e9, 25e9, 8, 0.869),
        "H100": Rating(3.35e12, 450e9, 50e9, 8, 0.803),
        "H200": Rating(4.8e12, 450e9, 50e9, 8, 0.803),
    }
)


@dataclass(frozen=True)
class Rates:
    """The speed of one card at each kind of work, as the roofline uses it."""

    matmul: float  # FLOP/s in 16 bits
    full: float  # FLOP/s in fp32
    attention: float  # FLOP/s
    vector: float  # bytes a second of element-wise operators
    link: float  # bytes a second that the card sends to cards of its server, in collectives
    network: float  # bytes a second that the card sends to other servers
    launch: float  # seconds of the host for one operator
    server: int  # cards of a server


def rates_of(chip: Chip) -> Rates | None:
    """Return the rates of a kind of card, estimated from its data sheet.

    Returns None if its peak or its bandwidths are unknown.
    """
    rating = RATINGS.get(chip.name)
    if rating is None or not chip.tflops:
        return None
    peak = 1e12 * chip.tflops
    matmul = SHAPES * rating.best * peak
    return Rates(
        matmul=matmul,
        full=FULL * matmul,
        attention=ATTENTION * peak,
        vector=VECTOR * rating.memory,
        link=LINK * rating.link,
        network=LINK * rating.network,
        launch=LAUNCH_SECONDS,
        server=rating.server,
    )


def in_fp8(rates: Rates) -> Rates:
    """Return the rates of an H100 or H200 whose large matrices multiply in FP8."""
    return replace(rates, matmul=SHAPES * EIGHT_BITS)
