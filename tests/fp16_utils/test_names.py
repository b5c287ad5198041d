"""Names, module paths and signatures of apex.fp16_utils."""

import importlib
import inspect

import pytest

from apex import fp16_utils

PATHS = [
    *(("apex.fp16_utils", name) for name in fp16_utils.__all__),
    ("apex.fp16_utils.fp16_optimizer", "FP16_Optimizer"),
    ("apex.fp16_utils.loss_scaler", "LossScaler"),
    ("apex.fp16_utils.loss_scaler", "DynamicLossScaler"),
    ("apex.fp16_utils.loss_scaler", "to_python_float"),
    ("apex.fp16_utils.fp16util", "network_to_half"),
    ("apex.fp16_utils.fp16util", "prep_param_lists"),
    ("apex.fp16_utils.fp16util", "clip_grad_norm"),
]


@pytest.mark.parametrize(("module", "name"), PATHS)
def test_names_are_where_apex_had_them(module, name):
    assert callable(getattr(importlib.import_module(module), name))


def test_a_star_import_gives_these_names():
    assert sorted(fp16_utils.__all__) == [
        "BN_convert_float",
        "DynamicLossScaler",
        "FP16Model",
        "FP16_Optimizer",
        "LossScaler",
        "clip_grad_norm",
        "convert_module",
        "convert_network",
        "master_params_to_model_params",
        "model_grads_to_master_grads",
        "network_to_half",
        "prep_param_lists",
        "to_python_float",
        "tofp16",
    ]


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            fp16_utils.FP16_Optimizer,
            "init_optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, "
            "dynamic_loss_args=None, verbose=True",
        ),
        (
            fp16_utils.FP16_Optimizer.backward,
            "self, loss, update_master_grads=True, retain_graph=False",
        ),
        (fp16_utils.FP16_Optimizer.step, "self, closure=None"),
        (fp16_utils.FP16_Optimizer.clip_master_grads, "self, max_norm, norm_type=2"),
        (fp16_utils.prep_param_lists, "model, flat_master=False"),
        (fp16_utils.model_grads_to_master_grads, "model_params, master_params, flat_master=False"),
        (
            fp16_utils.DynamicLossScaler,
            "init_scale=4294967296, scale_factor=2.0, scale_window=1000",
        ),
        (fp16_utils.LossScaler, "scale=1"),
        (fp16_utils.convert_network, "network, dtype"),
    ],
)
def test_arguments_are_apexs(function, arguments):
    parameters = inspect.signature(function).parameters.values()
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert ", ".join(shown) == arguments


def test_zero_grads_first_argument_is_apexs():
    names = list(inspect.signature(fp16_utils.FP16_Optimizer.zero_grad).parameters)
    assert names[:2] == ["self", "set_grads_to_None"]
