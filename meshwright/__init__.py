"""The name under which this project is installed: `meshwright.models.gpt` is the module that ships with it.

A user's folder or file may be called `runner`, `strategies` or `models`; this name belongs to the project alone, so the
installed command starts here. Importing it imports our `runner` first, which resolves the shared names.
"""

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])
__path__.append(_ROOT)
if "runner" not in sys.modules:
    sys.path.insert(0, _ROOT)
    import runner  # noqa: F401

    sys.path.remove(_ROOT)
