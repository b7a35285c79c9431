"""Training under budgets, against what people use today."""
