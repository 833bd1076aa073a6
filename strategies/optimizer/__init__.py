"""From gradients to the next weights: replicated updates, and ZeRO."""
