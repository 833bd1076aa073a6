"""`python -m runner.join FOLDER [--host NAME | --wait NAME]`: the process that every launcher starts. See
`runner.launch.launchers.join`."""

import os
import sys

if __name__ == "__main__":
    if sys.path[:1] == [here := os.path.dirname(os.path.realpath(__file__))]:  # started by the name of this file
        sys.path[0] = os.path.dirname(here)
        import runner  # noqa: F401  # ours, not another package of this name

        del sys.path[0]
    from runner.packages import installed_first

    installed_first()
    from runner.launch.launchers.join import main

    sys.exit(main(sys.argv[1:]))
