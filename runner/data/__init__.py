"""Data: the files, the shipped datasets, and the loading of exactly what one rank needs."""
