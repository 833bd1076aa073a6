"""Turn gradients into the next weights: replicated updates, and ZeRO."""
