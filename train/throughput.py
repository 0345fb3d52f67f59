"""How much work a step was, how much of the devices it has used, and what its time went to."""

import re
import resource
from collections.abc import Callable, Mapping
from typing import Any

import torch

from cache_ops.packing import PackedBatch
from recipes.schema import Recipe
from train.model_shape import ModelShape, RowShape

# Dense bf16 with fp32 sums, 10^12 operations a second, as the vendor gives them; first match.
_PEAK_TFLOPS = {
    "GB200": 2450, "B200": 2250, "GH200": 989, "H200": 989, "H800": 989, "H100 PCIe": 756,
    "H100 NVL": 835, "H100": 989, "H20": 148, "A100": 312, "A800": 312, "A40": 149.7, "A30": 165,
    "A10G": 70, "A10": 125, "L40S": 362, "L40": 181, "L4": 121, "RTX A6000": 154.8,
    "RTX 6000 Ada": 364, "RTX 5090": 209.5, "RTX 4090": 165.2, "RTX 3090": 71,
}  # fmt: skip


def flops_of(shape: ModelShape, config: Recipe) -> Callable[[PackedBatch], int]:
    """Counts the operations that a packed pass needs, forward and backward.

    Backward takes twice the operations of forward, and under LoRA as many, for frozen weights have
    no gradients. Chunks whose encoding has no gradient have no backward. What checkpointing
    computes again is not needed and does not count. A contextualizer is always trained.
    """
    backward = 2 if config.train.tuning == "full" else 1
    gradient = config.context.gradient

    def flops(batch: PackedBatch) -> int:
        own = RowShape.of(batch, frozen=True)
        forward = shape.forward_flops(RowShape.of(batch, frozen=gradient == "frozen"))
        trained = (2 - backward) * shape.contextualizer_flops(own)
        if gradient == "full" and config.train.tuning != "none":
            return int(forward * (1 + backward) + trained)
        return int(forward + trained + backward * shape.forward_flops(own))

    return flops


def peak_of(device: torch.device, config: Recipe) -> float | None:
    """Operations a second that a rank's device could do at best; None where that is not known.

    Known are GPUs that compute in bf16.
    """
    if device.type != "cuda" or "bf" not in config.train.mixed_precision + config.model.dtype:
        return None
    return bf16_peak(torch.cuda.get_device_name(device))


def bf16_peak(device_name: str) -> float | None:
    """The bf16 operations a second that a GPU of this name is sold with; None: unknown."""
    for name, tflops in _PEAK_TFLOPS.items():
        if re.search(rf"\b{name}\b", device_name.replace("-", " ")):
            return tflops * 1e12
    return None


def peak_memory_gib() -> float:
    """The most memory this process has held: of its GPU, or resident where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def used(values: Mapping[str, Any], peak: float | None) -> dict[str, float]:
    """Derived from a step's values: padding, time outside the computing phases, MFU.

    A packed row has no padding; what is computed for nothing are passes that a rank runs because
    others have one more.

    Args:
        values: of a step.
        peak: operations a second of all ranks' devices; without it there is no MFU.
    """
    phases = ("forward", "backward", "optimizer")
    computing = sum(values[f"seconds_{phase}"] for phase in phases)
    seconds = values["seconds"]
    shares = {
        "padding_share": round(values["filler_tokens"] / values["packed_tokens"], 4),
        "outside_share": round(max(0.0, 1 - computing / seconds), 4),
    }
    if peak is not None:
        shares["mfu"] = round(values["flops"] / seconds / peak, 4)
    return shares
