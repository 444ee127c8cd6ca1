"""First on ``PYTHONPATH``: every program of the run makes its CPU ranks use `nccl_like`."""

import importlib
import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_WORLDS = "myriad.comm.groups"


class _Installs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Installs the transport behind the import of the module that opens worlds."""

    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _WORLDS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        sys.path.append(str(Path(__file__).parents[1]))
        importlib.import_module("nccl_like").install()


sys.meta_path.insert(0, _Installs())
