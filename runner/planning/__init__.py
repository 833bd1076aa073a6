"""Plan a config, once per run: decisions, cost estimates and everything that the ranks need."""
