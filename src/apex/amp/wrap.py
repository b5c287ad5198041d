"""apex's module of wrappers for torch's functions, none of which are replaced here."""

from apex import _unavailable

__getattr__ = _unavailable.names_instead(
    __name__, {}, others="amp.register_half_function and its like"
)
