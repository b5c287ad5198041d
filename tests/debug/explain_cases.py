"""What the tests of ``explain`` share: tiny modules and how to find a row."""

from torch import nn


class Body(nn.Module):
    """A module whose forward is a given function of itself and the input."""

    def __init__(self, function, **members):
        super().__init__()
        self.function = function
        for name, value in members.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.function(self, x)


def row_of(found, op, module="", direction="forward", inside=True):
    """Returns the one row of an operator."""
    place = (f"aten.{op}", module, direction, inside)
    rows = [r for r in found.ops if (r.op, r.module, r.direction, r.inside) == place]
    assert len(rows) == 1, [f"{r.direction} {r.module} {r.op}" for r in found.ops]
    return rows[0]


def casts_of(row):
    """Returns count and bytes of a row's casts by their dtypes."""
    return {(c.source, c.target): (c.count, c.bytes) for c in row.casts}
