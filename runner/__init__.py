"""The front end of Meshwright: from a command line to a run, and the ranks that carry it out.

`command` takes the words, `config` and `schema` (with `sections`) say what they may be, `jobs` has a verb per file.
`planning` decides and prepares once per run with what `building` makes of the config's names, `reporting` tells it.
`start` has `launch` (this machine) or `launchers` (others) start ranks, which go on in `entries` and `training`, read
`data`, write `checkpoints`, and are watched and started again by `recovery`. `inference`, `conversion` and `sweeps` are
what their names say. Importing this package imports `packages` alone: torch must not be loaded before a config is good.
"""

from runner import packages

packages.install()
