"""From a text file to batches of token ids, without torch."""
