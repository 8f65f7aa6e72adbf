"""Pictures of the curves of a training stage."""

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

LABELS = {
    "reward": "mean reward",
    "accuracy": "accuracy on\nheld-out problems",
    "entropy": "entropy in\nnats a token",
    "length": "length of replies\nin tokens",
    "sampler_gap": "largest gap of\nsampler and trainer",
    "kl": "divergence from the\nfirst model in nats",
    "policy_shift": "shift of the policy\nin nats a token",
    "loss": "training loss\nin nats",
    "val_bpb": "validation in\nbits per byte",
    "val_accuracy": "preferences followed\non held-out pairs",
}
SCATTERED = (
    "reward",
    "entropy",
    "length",
    "sampler_gap",
    "kl",
    "policy_shift",
)  # from step to step


def running_mean(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """The debiased exponential average of the values so far."""
    means, total, share = [], 0.0, 0.0
    for value in values:
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        means.append(total / share)
    return means


def draw(title: str, runs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """A PNG with the curves of a training stage, one above the other; several runs, by name, share each axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    wanted = ("loss", "val_bpb", "val_accuracy")
    if any("reward" in data for data in runs.values()):
        wanted = ("reward", "accuracy", *SCATTERED[1:])
    shown = [curve for curve in wanted if any(data.get(curve) for data in runs.values())]
    size = (7, 1.2 + 2 * len(shown))
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=size, sharex=True, squeeze=False, layout="constrained"
    )
    for axis, curve in zip(axes[:, 0], shown, strict=True):
        faint = curve in SCATTERED
        measured = curve != "loss" and not faint  # now and then, and not in every step
        for i, (name, data) in enumerate(runs.items()):
            color = f"C{i}" if len(runs) > 1 else ("C1" if measured else "C0")
            steps, values = zip(*data.get(curve) or [(0, math.nan)], strict=True)
            axis.plot(
                steps,
                values,
                color=color,
                linewidth=1.2,
                alpha=0.25 if faint else 1,
                marker="o" if measured else None,
                markersize=3,
                label=None if faint else name,
            )
            if faint:
                axis.plot(steps, running_mean(values), color=color, linewidth=1.5, label=name)
        axis.set(ylabel=LABELS[curve])
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(runs) > 1:
        axes[0, 0].legend(fontsize="small")
    axes[0, 0].set(title=title)
    axes[-1, 0].set(xlabel="step")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    pyplot.close(figure)
    return file.getvalue()
