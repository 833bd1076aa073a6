"""Reports of a plan: tables, the HTML page, explanations and comparisons. Nothing is decided here."""
