"""A few words on each plan that people write by hand; their labels are names for files and the API."""

from typing import Final

from optimizer.search.questions.by_hand.setups import list_labels

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
    "shares_by_speed_hybrid_zero1": "shares of the batch by speed, optimizer state shared within each replica",
    "shares_by_speed_hybrid_zero2": "shares of the batch by speed, optimizer state and gradients shared within each replica",
    "shares_by_speed_hybrid_zero3": "shares of the batch by speed, state, gradients and weights shared within each replica",
    "shares_by_speed_local": "shares of the batch by speed, devices synchronized every few steps",
    "equal_shares": "equal shares of the batch, everything on each device",
    "equal_shares_zero1": "equal shares of the batch, optimizer state shared",
    "equal_shares_zero2": "equal shares of the batch, optimizer state and gradients shared",
    "equal_shares_hybrid_zero1": "equal shares of the batch, optimizer state shared within each replica",
    "equal_shares_hybrid_zero2": "equal shares of the batch, optimizer state and gradients shared within each replica",
    "equal_shares_hybrid_zero3": "equal shares of the batch, state, gradients and weights shared within each replica",
    "equal_shares_local": "equal shares of the batch, devices synchronized every few steps",
    **dict(list_labels()),
    # of a generation
    "resident": "all weights on the device, as many sequences as fit",
    "one_at_a_time": "all weights on the device, one sequence at a time",
    "all_at_once": "all weights on the device, all sequences at once",
    "stream_host": "weights come from the host, block by block",
    "stream_disk": "weights come from the disk, block by block",
}
