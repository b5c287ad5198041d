"""Layer norm and RMS norm as their papers write them, in fp64."""

import torch


def layer_norm(x, weight=None, bias=None, *, dims=1, eps):
    """Subtracts the mean and divides by the deviation over the last ``dims`` dimensions."""
    x, over = x.double(), tuple(range(-dims, 0))
    centered = x - x.mean(over, keepdim=True)
    y = centered / (centered.square().mean(over, keepdim=True) + eps).sqrt()
    return affine(y, weight, bias)


def rms_norm(x, weight=None, *, dims=1, eps):
    """Divides by the root of the mean square over the last ``dims`` dimensions."""
    x, over = x.double(), tuple(range(-dims, 0))
    return affine(x / (x.square().mean(over, keepdim=True) + eps).sqrt(), weight, None)


def affine(y, weight, bias):
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


def gradients(result, inputs):
    """Gradients of a weighted sum, so that no two elements count alike."""
    scale = torch.linspace(-1, 1, result.numel(), device=result.device).view_as(result)
    return torch.autograd.grad((result * scale.to(result.dtype)).sum(), inputs)


def assert_close(actual, expected, *, ulps=4):
    """Within ``ulps`` eps of the dtype of ``actual``, for values of about one."""
    bound = ulps * torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected.double(), rtol=bound, atol=bound)
