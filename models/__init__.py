"""Plain torch networks without parallel code, each reached by its dotted name in a config."""
