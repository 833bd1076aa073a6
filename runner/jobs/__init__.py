"""What `run` can do, one verb per file; `runner.command.verbs` is the table that leads here."""
