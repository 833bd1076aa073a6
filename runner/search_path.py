"""Where modules are looked for when python starts a module of ours (`python -m runner`).

Python puts the working directory first then, where a user's own folder `models` or `recipes` would hide ours; behind
everything that is installed it is found all the same, as the script `run` has it.
"""

import os
import sys
from contextlib import suppress


def installed_first() -> None:
    """Move the working directory to the end, if Python put it first."""
    with suppress(FileNotFoundError):  # the working directory is gone, which the command tells
        if sys.path[:1] == [os.getcwd()]:
            sys.path.append(sys.path.pop(0))
