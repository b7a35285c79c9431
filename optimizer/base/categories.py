"""The six categories of tensors, and the tiers they live on: one spelling for code, JSON, API, charts and terminal."""

from typing import Literal, get_args

Category = Literal[
    "weights",
    "gradients",
    "optimizer_state",
    "activations",
    "logits_and_loss",
    "kv_cache",
    "temporaries",
]
Tier = Literal["device", "host", "disk", "remote"]
Link = Literal[
    "device_to_host", "host_to_device", "host_to_disk", "disk_to_host", "host_to_remote", "remote_to_host"
]
"""A direction in which bytes move between tiers; bytes from the device reach disk or remote only through a copy on the host."""
Lane = Literal["compute", "copy_in", "copy_out", "host", "disk", "network"]
"""Parts of a machine that can be busy at once: the device, its copies from and to the host, the host's own work (updates, sums
of gradients), the scratch disk, the remote store. Top to bottom in every picture."""
BlockChoice = Literal["keep", "recompute", "selective", "offload", "offload_disk", "offload_remote"]
"""A block's way with the activations that it saves (``plan/activations.py``)."""

CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Bottom to top in every stack. ``temporaries`` also counts inputs, slack and other bytes that no decision changes."""

TIERS: tuple[Tier, ...] = get_args(Tier)
LINKS: tuple[Link, ...] = get_args(Link)
LANES: tuple[Lane, ...] = get_args(Lane)

CATEGORY_LABELS: dict[Category, str] = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_state": "optimizer state",
    "activations": "activations",
    "logits_and_loss": "logits and loss",
    "kv_cache": "KV cache",
    "temporaries": "temporaries",
}
