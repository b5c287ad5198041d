"""Cells that keep their hidden state, and stacks of cells in one or two directions.

States persist between calls, with their graph: ``detach_hidden`` detaches them, ``reset_hidden``
sets them to zeros. A different batch size starts from zeros.
"""

from apex.RNN._bidirectional import bidirectionalRNN
from apex.RNN._cell import RNNCell
from apex.RNN._stacked import stackedRNN

__all__ = ["RNNCell", "bidirectionalRNN", "stackedRNN"]
