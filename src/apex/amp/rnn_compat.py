"""The one name of apex's module for RNNs that scripts import."""

from apex import _unavailable

__getattr__ = _unavailable.names_instead(
    __name__, {}, others="torch's RNNs, to which op casts apply directly"
)


def has_old_rnns() -> bool:
    """Returns False: no torch since 1.1 has the RNNs that apex looked for."""
    return False
