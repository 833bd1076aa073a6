"""What users are told of a plan: tables, the page, explanations and comparisons. Nothing is decided here."""
