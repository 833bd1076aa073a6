"""`python -m meshwright`: the command `run`."""

from runner.__main__ import main

__all__ = ["main"]

if __name__ == "__main__":
    from runner.packages import installed_first

    installed_first()
    main()
