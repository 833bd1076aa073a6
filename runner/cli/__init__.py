"""The command line: words and verbs, what Hydra is given and says, recipes, and what a refused run leaves behind."""
