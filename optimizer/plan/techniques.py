"""Names and groups of the techniques on a page and in a terminal."""

from typing import Final, Literal

Technique = Literal[
    "recompute",
    "offload",
    "accumulate",
    "chunked_loss",
    "consume_gradients",
    "offload_gradients",
    "offload_optimizer",
    "stream_weights",
    "disk",
    "remote",
    "compress",
    "bf16",
    "fp16",
    "autocast",
    "8bit_optimizer",
    "quantize_frozen",
    "offload_kv",
    "host_attention",
    "quantize_kv",
    "rebuild_kv",
]
"""Techniques that a goal may forbid. ``disk`` and ``remote`` forbid a place, whatever would live there."""
LOSSY: tuple[Technique, ...] = ("compress", "bf16", "fp16", "autocast", "8bit_optimizer", "quantize_frozen", "quantize_kv")
"""Techniques that change the numbers."""
ROUNDING: tuple[Technique, ...] = ("bf16", "fp16", "autocast", "8bit_optimizer")
"""Lossy techniques that only round, as training in 16 bits does. The others' effect on a result depends on the model."""

TECHNIQUE_LABELS: Final[dict[Technique, str]] = {
    "recompute": "recompute activations",
    "offload": "offload activations",
    "compress": "compress offloaded activations",
    "accumulate": "split the batch (accumulate)",
    "chunked_loss": "make the loss in chunks",
    "consume_gradients": "update as gradients appear",
    "offload_gradients": "gradients on the host",
    "offload_optimizer": "optimizer state on the host",
    "stream_weights": "stream weights block by block",
    "8bit_optimizer": "8-bit optimizer state",
    "bf16": "bf16 weights",
    "fp16": "fp16 weights",
    "autocast": "autocast (products in bf16 or fp16)",
    "quantize_frozen": "weights in 8 or 4 bits under adapters",
    "offload_kv": "keys and values off the device",
    "host_attention": "attention on the host",
    "quantize_kv": "keys and values in int8 or int4",
    "rebuild_kv": "keys and values made again from hidden states",
    "disk": "anything on disk",
    "remote": "anything in a remote store",
}
"""All of them, in the order of ``TECHNIQUE_GROUPS``."""

TECHNIQUE_GROUPS: Final[tuple[tuple[str, tuple[Technique, ...]], ...]] = (
    ("Activations", ("recompute", "offload", "compress")),
    ("Batch and loss", ("accumulate", "chunked_loss")),
    (
        "Gradients, optimizer state and weights",
        ("consume_gradients", "offload_gradients", "offload_optimizer", "stream_weights", "8bit_optimizer"),
    ),
    ("Number formats", ("bf16", "fp16", "autocast", "quantize_frozen")),
    ("Keys and values of generations", ("offload_kv", "host_attention", "quantize_kv", "rebuild_kv")),
    ("Places", ("disk", "remote")),
)
