"""Config files read by libyaml, in a tenth of the time of the parser in Python, which OmegaConf takes: it has no switch
for it, so its method is replaced for as long as Hydra composes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import IO, Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader


@contextmanager
def read_by_libyaml() -> Iterator[None]:
    """Inside of the block, open files are read so. What libyaml refuses is read by the other parser, whose errors show
    the line; without libyaml everything is."""
    load = OmegaConf.load

    def fast(file_: str | IO[Any]) -> Any:
        if isinstance(file_, io.IOBase) and file_.seekable() and yaml.__with_libyaml__:
            start = file_.tell()
            try:
                content = yaml.load(file_, Loader=_loader())
            except yaml.YAMLError:
                content = None
            if isinstance(content, dict):
                return OmegaConf.create(content)
            file_.seek(start)
        return load(file_)

    OmegaConf.load = staticmethod(fast)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        OmegaConf.load = staticmethod(load)  # type: ignore[method-assign]


@cache
def _loader() -> type:
    """OmegaConf's, which knows its floats and refuses a key that occurs twice, behind libyaml's parser."""
    from yaml.constructor import SafeConstructor
    from yaml.cyaml import CParser
    from yaml.resolver import Resolver

    def begin(loader: Any, stream: Any) -> None:
        CParser.__init__(loader, stream)
        SafeConstructor.__init__(loader)
        Resolver.__init__(loader)

    return type("Loader", (CParser, get_yaml_loader()), {"__init__": begin})
