"""Pages that are one file and need nothing else: no network, no scripts, no fonts from elsewhere."""
