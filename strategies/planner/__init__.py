"""Make a plan from an operator graph and a request."""
