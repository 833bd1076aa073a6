"""The folder of a run: which process works in it, and which run it belongs to. Imports no torch."""
