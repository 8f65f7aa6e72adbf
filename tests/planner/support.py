"""What the planner's tests share."""

from dataclasses import dataclass

from nanochat.planner.calibration import Bench
from nanochat.planner.cards import Rates


@dataclass(frozen=True)
class Kind:
    """A kind of card."""

    name: str
    tflops: float
    memory_gib: float
    trains: bool = True


BENCH = Bench("910B3", 8, "bfloat16", 260.0, 70.0, 110.0, 1200.0, 9.5, 120.0, 3.0, "2.9.0", "2.9.0.post2", "8.5.0")
# Round numbers: 1 TFLOP/s, 1 GB/s, 1 ms a launch, so that a table can be made by hand.
SLOW = Rates(1e12, 0.25e12, 0.5e12, 1e9, 1e9, 0.1e9, 1e-3, 8)
