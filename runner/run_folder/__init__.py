"""The folder of a run: which process works in it, which run it belongs to, and its plan. Imports no torch."""

CONFIG_FILE = "config.json"
"""All that was configured."""
RESCUED = ".step-*.rescue"
"""In its folder of checkpoints, what ranks have saved from memory when a run failed."""
