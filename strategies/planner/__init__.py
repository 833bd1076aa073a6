"""From an operator graph and a request to a plan."""
