"""The one name of apex's module for old releases of torch that scripts import."""

from collections.abc import Iterable

from apex import _unavailable

__getattr__ = _unavailable.names_instead(
    __name__, {}, others="torch's own functions, such as torch.is_floating_point"
)


def filter_attrs(module: object, attrs: Iterable[str]) -> list[str]:
    """Returns the names in ``attrs`` that are attributes of ``module``."""
    return [name for name in attrs if hasattr(module, name)]
