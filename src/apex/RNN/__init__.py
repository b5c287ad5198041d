"""Recurrent networks whose cells keep their hidden state between calls."""

from apex.RNN.models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
