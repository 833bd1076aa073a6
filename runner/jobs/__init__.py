"""What `run` can do, one verb per file; `runner.verbs` is the table that leads here."""
