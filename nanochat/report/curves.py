"""Draws the curves of a training stage as a PNG."""

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
    "general_perplexity": "perplexity of\ngeneral text",
    "core": "CORE",
    "chat_core": "chat tasks,\nmean above guessing",
}
# Curve -> name and value of a published model, drawn as a line for orientation. GPT-2's CORE is
# upstream's measurement of the 1.6 B model on all problems (its README).
LANDMARKS = {"core": ("GPT-2", 0.256525)}
# Figures of RL that vary much from step to step, drawn faintly under their running mean.
SCATTERED = ("reward", "entropy", "length", "sampler_gap", "kl", "policy_shift")
TRAINING_CURVES = ("loss", "val_bpb", "val_accuracy", "general_perplexity", "core", "chat_core")
RL_CURVES = ("reward", "accuracy", *SCATTERED[1:])


def running_mean(values: Sequence[float], weight: float = 0.95) -> list[float]:
    """Return, for each value, the debiased exponential average of all values up to it."""
    means = []
    average = 0.0
    total_weight = 0.0
    for value in values:
        average = weight * average + (1 - weight) * value
        total_weight = weight * total_weight + (1 - weight)
        means.append(average / total_weight)
    return means


def draw(title: str, runs: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return a PNG with one plot for each curve of a training stage, one above the other.

    `runs` maps the name of each run to its section for the stage. All runs share each plot.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    is_rl = any("reward" in section for section in runs.values())
    candidates = RL_CURVES if is_rl else TRAINING_CURVES
    sections = runs.values()
    curves = [curve for curve in candidates if any(section.get(curve) for section in sections)]
    figure, axes = pyplot.subplots(
        len(curves),
        1,
        figsize=(7, 1.2 + 2 * len(curves)),
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, curve in zip(axes[:, 0], curves, strict=True):
        _draw_curve(axis, curve, runs)
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


def _draw_curve(
    axis: Any,
    curve: str,
    runs: Mapping[str, Mapping[str, Any]],
) -> None:
    if curve in LANDMARKS:
        landmark, value = LANDMARKS[curve]
        axis.axhline(value, color="gray", linestyle="--", linewidth=1)
        axis.annotate(
            landmark, (1, value), xycoords=("axes fraction", "data"), ha="right", va="bottom"
        )
    scattered = curve in SCATTERED
    sparse = curve != "loss" and not scattered  # measured now and then, not in every step
    for index, (name, section) in enumerate(runs.items()):
        color = f"C{index}"
        if len(runs) == 1 and sparse:
            color = "C1"
        points = section.get(curve) or [(0, math.nan)]
        steps, values = zip(*points, strict=True)
        axis.plot(
            steps,
            values,
            color=color,
            linewidth=1.2,
            alpha=0.25 if scattered else 1,
            marker="o" if sparse else None,
            markersize=3,
            label=None if scattered else name,
        )
        if scattered:
            axis.plot(steps, running_mean(values), color=color, linewidth=1.5, label=name)
