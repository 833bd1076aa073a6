"""The front end of Meshwright: from a command line to a run, and the ranks that carry it out.

Rooms, lower ones first; none imports a later one, not even inside a function:

`config` says what the words of a command may be. `launch` runs functions in ranks, here or by `launchers`, and watches
them; `run_folder` is that of one process and one run. `checkpoint`; `build` makes the objects behind the config's
names; `data`; `planning` decides and prepares once per run; `conversion` of checkpoints; `training` on one rank;
`predict`; `report`; `recovery` starts a failed run again; `sweep`; `cli` leads from words to a verb of `commands`,
which has one per file, and in `entries` what their ranks run.

Importing this package imports `packages` alone: torch must not be loaded before a config is good.
"""

from runner import packages

packages.install()
