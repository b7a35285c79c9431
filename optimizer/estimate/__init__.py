"""What a plan costs, in bytes over time per tier and category, and in milliseconds per lane."""
