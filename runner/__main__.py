"""`python -m runner` is the command `run`."""

from runner.cli import main

if __name__ == "__main__":
    main()
