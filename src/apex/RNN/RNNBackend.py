"""Cells that keep their hidden state, and stacks of them in one or two directions.

States carry over from call to call with their graph: ``detach_hidden`` cuts it, ``reset_hidden``
sets zeros. Another batch size starts from zeros.
"""

from apex.RNN._bidirectional import bidirectionalRNN
from apex.RNN._cell import RNNCell
from apex.RNN._stacked import stackedRNN

__all__ = ["RNNCell", "bidirectionalRNN", "stackedRNN"]
