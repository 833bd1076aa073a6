"""Plans in the formats of others."""
