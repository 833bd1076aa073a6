"""Memory of a rank: a fast additive estimate, an exact trace of the program, repeated blocks, ZeRO."""
