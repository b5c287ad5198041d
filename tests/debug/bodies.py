"""Modules for tests that plant one line in a model."""

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


class Exp(nn.Module):
    def forward(self, x):
        return x.exp()


def overflowing_net():
    net = nn.Sequential(nn.Linear(2, 2), Exp())
    nn.init.constant_(net[0].weight, 60.0)
    return net
