"""timm's ``ApexScaler``, and a step of one of its models."""

import pytest
import torch
from torch.nn.utils import get_total_norm
from torch.testing import assert_close

from tests.clients.libraries import need
from tests.support.loops import descend, masters, prepared

timm = need("timm")
need("timm.layers")  # not in 0.4, which test_timm_of_2021.py runs
cuda = need("timm.utils.cuda")

pytestmark = pytest.mark.clients


def prepared_vit(level, **options):
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 1, "num_classes": 2}
    model = timm.create_model("vit_tiny_patch16_224", **sizes)
    return prepared(level, lambda p: torch.optim.SGD(p, lr=1.0), model, **options)


def loss_of(model):
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model(images).float().pow(2).mean()


def test_timm_finds_apex():
    from timm.layers import fast_norm

    assert cuda.has_apex
    assert fast_norm.has_apex
    assert fast_norm.has_apex_rmsnorm


def test_the_scaler_trains_as_the_three_lines_do(level):
    model, optimizer = prepared_vit(level, loss_scale=2.0**8)
    cuda.ApexScaler()(loss_of(model), optimizer)
    by_timm = masters(optimizer)

    model, optimizer = prepared_vit(level, loss_scale=2.0**8)
    descend(loss_of(model), optimizer)
    assert_close(by_timm, masters(optimizer), rtol=0, atol=0)


def test_the_scaler_clips_the_unscaled_gradients_of_the_masters(level):
    model, optimizer = prepared_vit(level, loss_scale=2.0**8)
    before = masters(optimizer)
    cuda.ApexScaler()(loss_of(model), optimizer, clip_grad=2.0**-10)
    moved = [new - old for new, old in zip(masters(optimizer), before, strict=True)]
    assert_close(get_total_norm(moved).item(), 2.0**-10, rtol=1e-3, atol=0)


@pytest.fixture
def fast_norm():
    from timm.layers import set_fast_norm

    set_fast_norm(True)
    yield
    set_fast_norm(False)


def on_a_row(kind):
    generator = torch.Generator().manual_seed(2)
    module = kind(8)
    torch.nn.init.uniform_(module.weight, generator=generator)
    return module(torch.randn(3, 8, generator=generator))


@pytest.mark.parametrize("name", ["RmsNorm", "LayerNorm"])
def test_timms_fast_norms_run_on_ours_and_give_what_its_own_give(name, request):
    from timm.layers import norm

    own = on_a_row(getattr(norm, name))
    request.getfixturevalue("fast_norm")
    fast = on_a_row(getattr(norm, name))
    assert_close(fast, own)
