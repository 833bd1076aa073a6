"""From a config to a plan and everything that the ranks need: decisions, cost estimates and preparation, once per
run."""
