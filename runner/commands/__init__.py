"""What `run` can do, one verb per file; `runner.cli.verbs` is the table that leads here."""
