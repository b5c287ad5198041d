"""The interface of NVIDIA's norm: a kernel module, looked up when a norm is made."""

import importlib

import torch

WHOSE = "theirs"


class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, shape, eps):
        kernels = importlib.import_module("fused_layer_norm_cuda")
        out, mean, invvar = kernels.forward_affine(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, invvar)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx, grad):
        kernels = importlib.import_module("fused_layer_norm_cuda")
        x, weight, bias, mean, invvar = ctx.saved_tensors
        grads = kernels.backward_affine(
            grad.contiguous(), mean, invvar, x, ctx.shape, weight, bias, ctx.eps
        )
        return *grads, None, None


class FusedLayerNorm(torch.nn.Module):
    def __init__(self, size, eps=1e-5):
        super().__init__()
        importlib.import_module("fused_layer_norm_cuda")
        self.shape, self.eps = torch.Size([size]), eps
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.bias = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        with torch.amp.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return Affine.apply(x, weight, bias, self.shape, self.eps)
