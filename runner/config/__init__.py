"""The config schema: the sections, one file each, and their common building blocks."""
