"""The proof of batch generation: throughput, memory and bytes moved, against what transformers and accelerate offer."""
