"""The verbs of `run`, one per file; `runner.cli.verbs` is their table."""
