"""The module ``fused_adam_cuda``: one step against a plain loop, and as OpenNMT-py 1.x uses it."""

import pytest
import torch

import apex
import fused_adam_cuda

NONE = torch.tensor([], dtype=torch.float)


def plain(p, m, v, g, *, lr=0.1, betas=(0.8, 0.9), eps=1e-4, decay=0.1, step=1, mode=1, correct=1):
    p, m, v, g = (each.double() for each in (p, m, v, g))
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g * g
    size = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step) if correct else lr
    denominator = (v + eps).sqrt() if mode == 0 else v.sqrt() + eps
    return p - size * (m / denominator + decay * p), m, v


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    p, m, v, g = torch.randn(4, 3, 5, generator=generator).to(dtype).unbind()
    return p.clone(), m.clone(), v.abs(), g.clone()


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("correct", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_is_its_plain_loop(mode, correct, dtype):
    p, m, v, g = tensors()
    expected = plain(p, m, v, g, step=3, mode=mode, correct=correct)
    out = torch.zeros(3, 5, dtype=dtype)
    fused_adam_cuda.adam(
        p, out, m, v, (g * 8).to(dtype), 0.1, 0.8, 0.9, 1e-4, 8.0, 3, mode, correct, 0.1
    )
    tolerance = 8 * torch.finfo(dtype).eps
    for ours, theirs in zip((p, m, v), expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(out, p.to(dtype))


def test_the_gradient_is_left_as_it_is_and_no_copy_is_written():
    p, m, v, g = tensors()
    before = g.clone()
    fused_adam_cuda.adam(p, NONE, m, v, g, 0.1, 0.8, 0.9, 1e-4, 1.0, 1, 1, 1, 0.0)
    assert torch.equal(g, before)
    assert NONE.numel() == 0


def test_what_does_not_fit_is_refused_before_anything_changes():
    p, m, v, g = tensors()
    before = p.clone()
    with pytest.raises(ValueError, match="got g of 4 elements for a parameter of 15"):
        fused_adam_cuda.adam(p, NONE, m, v, g.view(-1)[:4], 0.1, 0.8, 0.9, 1e-4, 1.0, 1, 1, 1, 0.0)
    with pytest.raises(ValueError, match="mode is 2"):
        fused_adam_cuda.adam(p, NONE, m, v, g, 0.1, 0.8, 0.9, 1e-4, 1.0, 1, 2, 1, 0.0)
    with pytest.raises(TypeError, match="dense"):
        fused_adam_cuda.adam(p, NONE, m, v, g.to_sparse(), 0.1, 0.8, 0.9, 1e-4, 1.0, 1, 1, 1, 0.0)
    assert torch.equal(p, before)


def test_its_other_functions_say_what_to_use():
    with pytest.raises(AttributeError, match=r"amp_C\.multi_tensor_adam"):
        _ = fused_adam_cuda.adam_mt


class ScriptAdam(torch.optim.Optimizer):
    """An optimizer of a script's own that steps through the module, as OpenNMT-py's FusedAdam."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.05})

    def step(self, closure=None, grads=None, output_params=None, scale=1.0, grad_norms=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, m=torch.zeros_like(p.data), v=torch.zeros_like(p.data))
                state["step"] += 1
                m, v, count, rate = state["m"], state["v"], state["step"], group["lr"]
                fused_adam_cuda.adam(
                    *(p.data, NONE, m, v, p.grad.data, rate),
                    *(0.9, 0.999, 1e-8, scale, count, 1, 1, 0.0),
                )


def test_a_script_s_own_optimizer_trains_half_weights_in_contrib_fp16_optimizer():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    twin = torch.nn.Linear(4, 1)
    twin.load_state_dict(model.state_dict())
    model.half()
    twin.half().float()
    optimizer = apex.contrib.optimizers.FP16_Optimizer(
        ScriptAdam(model.parameters()), static_loss_scale=128.0
    )
    reference = torch.optim.Adam(twin.parameters(), lr=0.05)
    x = torch.randn(8, 4).half()
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.backward(model(x).float().pow(2).mean())
        optimizer.step()
        reference.zero_grad()
        twin(x.float()).pow(2).mean().backward()
        reference.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=0.01)
