"""Every causal LM that transformers builds, tiny: trained by transformers, then estimated and trained here."""
