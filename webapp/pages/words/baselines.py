"""A few words on each plan that people write by hand; their labels are names for files and the API."""

from typing import Final

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
    # of a generation
    "resident": "all weights on the device, as many sequences as fit",
    "one_at_a_time": "all weights on the device, one sequence at a time",
    "all_at_once": "all weights on the device, all sequences at once",
    "stream_host": "weights come from the host, block by block",
    "stream_disk": "weights come from the disk, block by block",
}
