"""`python -m runner.join FOLDER [--host NAME]`: what every launcher starts. See `runner.launchers.joining`."""

import sys

from runner.search_path import installed_first

if __name__ == "__main__":
    installed_first()
    from runner.launchers.joining import main

    sys.exit(main(sys.argv[1:]))
