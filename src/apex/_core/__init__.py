"""Values and rules on torch alone: no hooks, no logging, nothing kept from one call to the next.

A function whose name ends in an underscore changes tensors that it is given, as in torch. Any other
is pure, unless its docstring says what it changes.
"""
