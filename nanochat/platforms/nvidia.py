"""NVIDIA GPUs by name: their peaks, and what to say of one that is taken; ascend.py is the same for NPUs."""

# Dense tensor-core peaks in TFLOP/s for bf16/fp16, from the vendors' data sheets, by a part of the device's name.
PEAKS = {
    "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H800": 989, "H20": 148, "A100": 312, "A800": 312,
    "A6000": 155, "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125, "V100": 125, "T4": 65, "4090": 165,
    "3090": 71, "B200": 2250, "5090": 210,
}  # fmt: skip


def peak_tflops(name: str) -> float | None:
    """The peak of a device by its full name; None for one that is not known."""
    return next((tflops for part, tflops in PEAKS.items() if part in name), None)


def in_use(card: int, free: int, total: int) -> str:
    """What to say of a GPU of which another process holds memory; "" if it is as good as empty."""
    if free >= 0.8 * total:
        return ""
    return (
        f"GPU {card} is in use: {free / 2**30:.0f} of {total / 2**30:.0f} GiB are free. `nvidia-smi` shows by which "
        "process; CUDA_VISIBLE_DEVICES chooses another"
    )


def cannot_open(card: int, failure: str) -> str:
    """Why a GPU could not be taken, with what may help."""
    first = (failure.splitlines() or ["no reason given"])[0]
    return (
        f"GPU {card} cannot be opened: {first}. Another process may hold it alone, or all of its memory: look at "
        "`nvidia-smi`, or choose another with CUDA_VISIBLE_DEVICES."
    )
