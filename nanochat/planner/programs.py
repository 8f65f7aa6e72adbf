"""Lists the bytes and operators that a model needs on each kind of card, by the kernels in use.

The numbers were counted on tensors without data and on the emulated card; dev/LOG.md has the table
and the commands. After changing kernels, count again and update the numbers here.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from nanochat.planner.work import Program, Traffic

# With --kernels auto, on cards that have fused operators.
FUSED = Program(
    Traffic(
        stream=247,
        ends=149,
        logits=55,
        head=0.012,
        matrix=11,
        table=16,
        matrix_step=106,
        table_step=32,
        exclusive=54,
    ),
    layer_operators=47.5,
    exclusive_operators=11,
    pass_operators=101,
    step_operators=225,
)
# With --kernels plain: torch's own operators, one after the other. Counted for upstream's model,
# without bigrams and offset keys, because the published runs train that model. The two numbers of
# exclusive attention are those of our own.
PLAIN = Program(
    Traffic(
        stream=774,
        ends=297,
        logits=126,
        head=0.01,
        matrix=24,
        table=16,
        matrix_step=260,
        table_step=32,
        exclusive=173,
    ),
    layer_operators=163.5,
    exclusive_operators=32.5,
    pass_operators=152,
    step_operators=1130,
)
# Cards without fused attention: blocks of matmuls, whose scores go through memory. Counted at 2,048
# tokens a row.
CHUNKED = replace(
    FUSED, traffic=replace(FUSED.traffic, stream=2070), layer_operators=259, pass_operators=122
)
# torch.compile: every element-wise chain reads and writes its tensors once. Counted by hand: 40
# bytes forward and 85 backward for each token, layer and channel, 6 and 12 more in a layer with
# exclusive attention, and 16 for each logit; graphs replace most launches.
COMPILED = Program(
    Traffic(
        stream=125,
        ends=100,
        logits=16,
        head=0,
        matrix=18,
        table=8,
        matrix_step=60,
        table_step=32,
        exclusive=18,
    ),
    layer_operators=10,
    pass_operators=20,
    step_operators=100,
)
# The same with --matmul fp8: 18 tensors a layer are scaled and cast to 8 bits, 120 bytes more for
# each token, layer and channel.
COMPILED_FP8 = replace(
    COMPILED, traffic=replace(COMPILED.traffic, stream=COMPILED.traffic.stream + 120)
)
PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {"910A": CHUNKED, "A100": COMPILED, "H100": COMPILED, "H200": COMPILED}
)
# Kinds of card that train faster with --matmul fp8
PROGRAMS_FP8: Mapping[str, Program] = MappingProxyType({"H100": COMPILED_FP8, "H200": COMPILED_FP8})


def program_of(chip: str) -> Program:
    """Return the costs of the code that runs by default on the kind of card called `chip`."""
    return PROGRAMS.get(chip, FUSED)
