"""A few words on each plan that people write by hand; their labels are names for files and the API."""

from typing import Final

_SETUPS: Final = {
    "ddp": "DDP: everything on each device",
    "zero1": "ZeRO-1: optimizer state shared out",
    "zero2": "ZeRO-2: optimizer state and gradients shared out",
    "fsdp": "FSDP (ZeRO-3): weights, gradients and state shared out",
    "zero_offload": "ZeRO-Offload: gradients and state shared out, on the host",
    "fsdp_offload": "FSDP with CPU offload: weights, gradients and state on the host",
    "tensor": "tensor parallel: a part of each block on each device",
    "1f1b": "pipeline of an even cut (1F1B)",
    "pooled": "pooled: the host has all, each device works on two blocks in turn",
}
"""Setups of several devices."""
_RECOMPUTING: Final = {
    "": "no block recomputed",
    "_recompute": "every block recomputed",
    "_some_recompute": "as few blocks recomputed as have to be",
}
"""Their ways to recompute, by the end of a label."""
BASELINE_WORDS: Final = {
    "keep_all": "plain training, no memory saved",
    "recompute_all": "every block is recomputed (gradient checkpointing)",
    "selective_all": "in every block only the cheap ops are recomputed",
    "offload_all": "all activations go to the host",
    "every_second": "every second block is recomputed",
    "every_third": "every third block is recomputed",
    "every_root": "every k-th of k × k blocks is recomputed",
    "torch_memory_budget": "as many blocks kept as torch's activation_memory_budget would",
    "torch_sac_milp": "as many blocks kept as torch's sac_milp would",
    "accumulate_all": "one sequence at a time, nothing else saved",
    "chunked_loss": "plain training with the loss in chunks",
    "offload_optimizer": "gradients and optimizer state on the host",
    "stream_all": "weights, gradients and state on the host, every block recomputed",
    # of devices of several kinds
    "shares_by_speed": "shares of the batch by speed, everything on each device",
    "shares_by_speed_zero1": "shares of the batch by speed, optimizer state shared",
    "shares_by_speed_zero2": "shares of the batch by speed, optimizer state and gradients shared",
    "shares_by_speed_local": "shares of the batch by speed, devices synchronized every few steps",
    "equal_shares": "equal shares of the batch, everything on each device",
    "equal_shares_zero1": "equal shares of the batch, optimizer state shared",
    "equal_shares_zero2": "equal shares of the batch, optimizer state and gradients shared",
    "equal_shares_local": "equal shares of the batch, devices synchronized every few steps",
    **{f"{setup}{end}": f"{words}; {way}" for setup, words in _SETUPS.items() for end, way in _RECOMPUTING.items()},
    # of a generation
    "resident": "all weights on the device, as many sequences as fit",
    "one_at_a_time": "all weights on the device, one sequence at a time",
    "all_at_once": "all weights on the device, all sequences at once",
    "stream_host": "weights come from the host, block by block",
    "stream_disk": "weights come from the disk, block by block",
}
