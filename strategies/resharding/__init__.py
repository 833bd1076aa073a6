"""Resharding between two layouts: the cheapest sequence of collectives, its steps and its bytes."""
