"""From layout to layout: the cheapest sequence of collectives, its steps and its bytes."""
