"""`ranks`: run an entry of `sharded_training` (or another module here) on real processes; `training`: that module."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from runner.launch import run_ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def training() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        yield importlib.import_module("sharded_training")


@pytest.fixture(scope="session")
def ranks(training: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    def call(entry: str, payload: Any, world_size: int = 4, module: str = "sharded_training") -> Any:
        folder = tmp_path_factory.mktemp("run")
        return run_ranks(
            f"{module}:{entry}",
            payload,
            world_size=world_size,
            run_dir=folder,
            device="cpu",
            timeout=60.0,
            threads=1,
        )

    return call
