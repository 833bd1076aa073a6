"""Start the ranks of a run and monitor them until the last one has ended.

`warm` begins to import what ranks need, in the background; `run_ranks` runs one function in every rank. Importing this
package imports neither torch nor anything of the project that does.
"""

from runner.launch.forks import PRELOAD, warm
from runner.launch.local import run_ranks

__all__ = ["PRELOAD", "run_ranks", "warm"]
