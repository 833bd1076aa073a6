"""`python -m runner` is the command `run`."""

from runner.search_path import installed_first

if __name__ == "__main__":
    installed_first()
    from runner.command.cli import main

    main()
