"""The proof that the estimate is right: predicted against measured, over many models and plans."""
