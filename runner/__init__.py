"""The front end of Meshwright: from a command line to a run, and the ranks that carry it out.

Subpackages, lowest layer first; none imports a later one, not even inside a function:

`config` defines the schema of the config. `launch` runs functions in ranks, locally or through `launchers`, and
monitors them; `run_folder` locks the output folder of a run. `checkpoint` saves and loads; `build` instantiates the
config's targets; `data` loads batches; `planning` plans and prepares once per run; `conversion` converts checkpoints;
`training` runs on one rank; `predict`; `report`; `recovery` restarts a failed run; `sweep`; `cli` parses the command
line and dispatches to a verb of `commands`, one per file, whose rank functions are in `entries`.

Importing this package only imports `packages`: torch must not be loaded before the config is validated.
"""

from runner import packages

packages.install()
