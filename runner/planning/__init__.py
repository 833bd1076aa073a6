"""From a config to a plan and all that the ranks need: what is decided, priced, and prepared once per run."""
