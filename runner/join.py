"""`python -m runner.join FOLDER [--host NAME]`: what every launcher starts. See `runner.launchers.joining`."""

import sys

from runner.launchers.joining import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
