"""The command `run`, also as `python -m runner`: without Python's traceback on Ctrl-C, whenever it comes.

Before anything is imported, Ctrl-C ends the process at once, since there is nothing to clean up yet; after the command
it is ignored, since only interpreter shutdown remains.
"""

import gc
import os
import signal
import sys
from types import FrameType


def main() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _at_once)
    try:
        if sys.argv[1:] == ["--complete"] and not _hydra_knows():
            return
        gc.disable()  # nothing of what is imported here is ever freed
        from runner.cli.main import main as command

        gc.freeze()
        gc.enable()
        command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # or the interpreter would go through all objects twice before it ends


def _hydra_knows() -> bool:
    """Print what may follow on the line that a shell is asking about; or let Hydra do so, which takes a second."""
    from runner.cli.completion import offers

    found = offers(os.environ.get("COMP_LINE", ""))
    if found is not None:
        print("\n".join(found))
        return False
    sys.argv[1:] = ["-sc", "query=bash"]
    return True


def _at_once(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"run: interrupted.\n")
    finally:
        os._exit(130)


if __name__ == "__main__":
    if sys.path[:1] == [here := os.path.dirname(os.path.realpath(__file__))]:  # started by the name of this file
        sys.path[0] = os.path.dirname(here)
        import runner  # noqa: F401  # ours, not another package of this name

        del sys.path[0]
    from runner.packages import installed_first

    installed_first()
    main()
