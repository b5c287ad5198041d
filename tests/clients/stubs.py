"""Empty packages in place of those that a library imports for what has nothing to do with apex."""

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types


class _Module(types.ModuleType):
    """Holds whatever it is asked for: an empty class, or for a small name another such module."""

    __path__ = ()  # a package: whatever is below it can be imported

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        small = name == name.lower()
        setattr(self, name, _Module(name) if small else type(name, (), {}))
        return getattr(self, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if _below(name, self.packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def standing_in(*packages):
    """Lets ``packages`` be imported in here as empty ones, whether installed or not."""
    finder = _Finder(packages)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if _below(name, packages)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in list(sys.modules):
            if _below(name, packages):
                del sys.modules[name]
        sys.modules.update(hidden)


def _below(name, packages):
    return any(name == package or name.startswith(f"{package}.") for package in packages)
