"""The defaults, as data: `config.yaml` and the groups beside it. Every default of Meshwright is in this folder."""
