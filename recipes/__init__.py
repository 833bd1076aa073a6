"""The shipped recipes, as data: every `NAME.yaml` here is chosen with `+recipe=NAME`."""
