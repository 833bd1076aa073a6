"""Lowering of graph and plan to the program of all ranks, and the passes over programs."""
