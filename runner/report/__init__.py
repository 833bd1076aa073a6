"""What users read of a plan: tables, the page, explanations and comparisons. Nothing is decided here."""
