"""Searches: one algorithm per file, each from the configured operators to an assignment for every operator."""
