"""The version of apex's amp interface that this package follows."""

VERSION = (0, 1, 0)
__version__ = ".".join(map(str, VERSION))
