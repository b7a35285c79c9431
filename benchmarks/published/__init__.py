"""The estimator against what others measured and published."""
