"""Recurrent layers on a GPU: cuDNN wants their weights in one piece, or compacts them at each call.

It warns when it does, and warnings are errors here. In bf16 cuDNN computes from 9.13 on, but torch
2.13 does not lay the weights out for it: it compacts those of any bf16 model, amp's or not.
"""

import copy

import pytest
import torch
from torch import nn

from apex import amp
from tests.support import loops

pytestmark = pytest.mark.gpu
IN_PIECES = () if torch.bfloat16 in torch.backends.cudnn.CUDNN_TENSOR_DTYPES else ("O4", "O5")
COMPACTED = pytest.mark.filterwarnings("ignore:RNN module weights are not part:UserWarning")
EPS = {"O1": 2**-10, "O2": 2**-10, "O4": 2**-7, "O5": 2**-7}
LEVELS = [pytest.param(level, marks=COMPACTED) if level in IN_PIECES else level for level in EPS]


def tagger(kind):
    parts = {"rnn": kind(4, 3, num_layers=2, bidirectional=True), "head": nn.Linear(6, 2)}
    return loops.Body(lambda self, x: self.head(self.rnn(x)[0]), **parts)


def sequences():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(5, 2, 4, generator=generator), torch.randn(5, 2, 2, generator=generator)


def in_one_piece(model):
    return len({weight.untyped_storage().data_ptr() for weight in model.rnn.parameters()}) == 1


@loops.every(kind=[nn.LSTM, nn.GRU, nn.RNN], level=LEVELS)
def test_weights_are_in_one_piece_and_train_as_on_the_cpu(level, kind):
    here = tagger(kind)
    there = copy.deepcopy(here).cuda()
    pairs = [loops.prepared(level, model=model, loss_scale=64.0) for model in (here, there)]
    assert in_one_piece(there) or (level == "O5" and level in IN_PIECES)
    x, y = sequences()
    for _ in range(3):
        expected = loops.train_step(*pairs[0], x, y)
        loss = loops.train_step(*pairs[1], x.cuda(), y.cuda())
    assert in_one_piece(there) or (level == "O5" and level in IN_PIECES)
    tolerance = 16 * EPS[level]
    torch.testing.assert_close(loss.cpu(), expected, rtol=tolerance, atol=tolerance)
    for one, other in zip(*(loops.masters(optimizer) for _, optimizer in pairs), strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=tolerance, atol=tolerance)


def test_weights_stay_in_one_piece_whatever_writes_them():
    model, optimizer = loops.prepared("O2", model=tagger(nn.LSTM).cuda())
    x = sequences()[0].cuda()
    model.load_state_dict(model.state_dict())
    for master in amp.master_params(optimizer):
        master.data.clamp_(-0.1, 0.1)  # WGAN's clipping
    model(x)
    assert in_one_piece(model)
    amp.restore(model, optimizer)
    model(x)
    assert in_one_piece(model)
