"""A survey of architectures from installed packages, which nobody chose for this project: `python -m tests.survey`."""
