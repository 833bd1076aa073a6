"""ZeRO stages 1-3 by DeepSpeed."""
