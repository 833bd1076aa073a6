"""Training on one rank: the step, its metrics, and the single-device reference to compare with."""
