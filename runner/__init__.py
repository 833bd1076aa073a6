"""The front end of Meshwright: from a command line to a run, and the ranks that carry it out.

Rooms, lower ones first; none imports a later one, not even inside a function:

`config` what the words of a command may be; `launch` functions run in ranks, here or by `launchers`, and watched;
`build` objects behind the config's names; `data`; `planning` what is decided and prepared once per run; `checkpoint`;
`training` on one rank; `predict`; `report`; `recovery` starts a failed run again; `sweep`; `commands` one verb per
file, and `entries` that their ranks run; `cli` from words to a verb.

Importing this package imports `packages` alone: torch must not be loaded before a config is good.
"""

from runner import packages

packages.install()
