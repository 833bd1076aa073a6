"""Data: files, the shipped datasets, and loading exactly the rows and slices that a rank needs."""
