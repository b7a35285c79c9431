"""How a plan is carried out: one module per category of memory, beside the loop, the meter and the checkpoints."""
