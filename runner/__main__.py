"""The command `run`, also as `python -m runner`: without Python's traceback on Ctrl-C, whenever it comes.

Before anything is imported, Ctrl-C ends the process at once, since there is nothing to clean up yet; after the command
it is ignored, since only interpreter shutdown remains. That is cut short: to take apart all modules of torch, one by
one, frees nothing that the end of a process would not.
"""

import atexit
import gc
import os
import signal
import sys
import threading
from types import FrameType


def main() -> None:
    """The console script. Ends the process, unless an exception that nobody expects is on its way."""
    try:
        _main()
    except SystemExit as left:
        if left.code is not None and not isinstance(left.code, int):
            raise  # a message, which the interpreter prints
        _end(left.code or 0)
        raise
    _end(0)


def _end(code: int) -> None:
    """End the process as the interpreter would, but for taking its modules apart. Returns where that must be left to
    the interpreter: it waits for threads, and reports what cannot be written."""
    if any(one is not threading.current_thread() and not one.daemon for one in threading.enumerate()):
        return
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):  # nobody reads it, or it is closed
        return
    os._exit(code & 0xFF)


def _main() -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _at_once)
    try:
        if sys.argv[1:] == ["--complete"] and not _hydra_knows():
            return
        gc.disable()  # imported modules are never freed
        from runner.cli.main import main as command

        gc.freeze()
        gc.enable()
        command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        gc.freeze()  # or the interpreter, if it ends the process, would go through all objects twice before


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
