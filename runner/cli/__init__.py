"""The command line: arguments and verbs, Hydra's input and errors, recipes, and the clean-up after a rejected run."""
