"""``initialize``, ``restore`` and amp's own ``state_dict``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from apex._core.arguments import flag, integer
from apex._core.policy import Policy
from apex._core.scale import ScaleRule
from apex._core.undo import Undo
from apex._core.user_files import warn_at_caller
from apex._engine.conversion.plan import ModelPlan
from apex._engine.conversion.state import converted_in
from apex._engine.optimizer.subclass import prepared_state
from apex._engine.prepare import prepare
from apex._engine.restore import make_plain
from apex.amp import _initialize, inputs, report, scaler_states
from apex.amp._amp_state import _amp_state
from apex.amp.optimizers import listed, unwrapped
from apex.amp.properties import (
    O0,
    O1,
    O2,
    O3,
    O4,
    O5,
    Properties,
    level_defaults,
    opt_levels,
    resolve,
    to_policy,
)
from apex.amp.sessions import new_session, warn_if_casts_stay, warn_if_emulated

__all__ = [
    "O0",
    "O1",
    "O2",
    "O3",
    "O4",
    "O5",
    "Properties",
    "initialize",
    "load_state_dict",
    "opt_levels",
    "restore",
    "state_dict",
]


@inputs.takes_dtype_at(6, "patch_torch_functions_type")
def initialize(
    models: Any,
    optimizers: Any = None,
    enabled: bool = True,
    opt_level: str = "O1",
    cast_model_type: torch.dtype | bool | None = None,
    patch_torch_functions: bool | None = None,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
    *,
    patch_torch_functions_type: torch.dtype | None = None,
    fp32_modules: Sequence[type[nn.Module] | str] | None = (),
    fp32_inputs: Sequence[str | int] | None = (),
    fp32_buffers: Sequence[str] | None = (),
    growth_interval: int = 2000,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    keep_fp32_values: bool = False,
) -> Any:
    """Prepares models and optimizers for mixed precision and returns them.

    Models and optimizers are modified in place and returned. Depending on the level, a model casts
    its inputs or the inputs of each operator, and the optimizer updates fp32 masters. Call it after
    moving the models to their device and creating the optimizers, and before compiling the models
    or wrapping them in DistributedDataParallel. Further calls may prepare other models and
    optimizers; each call has its own loss scales. If a call fails, nothing is changed.

    ===== ============ ============ ========== ======= ========== ==============================
    level parameters   ops          batch norm masters loss scale use
    ===== ============ ============ ========== ======= ========== ==============================
    O0    fp32         fp32         fp32       no      1.0        fp32 baseline
    O1    fp32         fp16 by list input's    no      dynamic    recommended fp16 default
    O2    fp16         fp16         fp32       fp32    dynamic    fp16 weights with fp32 masters
    O3    fp16         fp16         fp16       no      1.0        upper bound on fp16 speed
    O4    fp32         bf16 by list input's    no      1.0        recommended bf16 default
    O5    bf16         bf16         fp32       fp32    1.0        bf16 weights with fp32 masters
    ===== ============ ============ ========== ======= ========== ==============================

    Args:
        models: A module in fp32, fp16, bf16 or a mix of them, or a list or tuple of them.
        optimizers: A ``torch.optim.Optimizer`` (or LARC around one), a list or tuple of them, or
            ``None`` for inference.
        enabled: If False, nothing is prepared and every amp call passes through. Casts of an
            earlier call stay on in this thread while its models live. This and the other bools may
            also be 0, 1, or one of the strings ``"True"`` and ``"False"``.
        opt_level: ``"O0"`` to ``"O5"``. The arguments below override single properties of the
            level; ``None`` keeps its default.
        cast_model_type: Dtype of parameters, buffers and inputs (O0, O2, O3, O5); False for no
            cast. O1 and O4 accept False and ``torch.float32``, which casts inputs and outputs.
        patch_torch_functions: Whether ops cast by the op table; False turns that off at O1 and O4.
        keep_batchnorm_fp32: Whether batch norm stays fp32 in a converted model (O2, O3, O5).
        master_weights: Whether optimizers update fp32 masters (O0, O2, O3, O5).
        loss_scale: A positive number, a string with one, or ``"dynamic"``. With a static scale,
            gradients are not checked and no step is skipped.
        cast_model_outputs: Dtype of the models' floating-point outputs. By default, models with
            ``cast_model_type`` return fp32, and others the dtype of their last op.
        num_losses: Number of loss scales; ``scale_loss`` selects one by ``loss_id``. May be 0 if a
            later call passes the optimizers.
        verbosity: 0 for no output, 1 for the start-up report and a line per overflow.
        min_loss_scale: Lower bound of a dynamic scale. Without it, the scale still never reaches 0.
        max_loss_scale: Largest dynamic scale.
        patch_torch_functions_type: fp16 or bf16, for the op casts of O1 and O4. May also follow
            ``patch_torch_functions`` by position, as in the ROCm fork.
        fp32_modules: Module types and name patterns (``"decoder.*.norm"``) that stay fp32 in a
            converted model, in addition to batch norm (O2, O3, O5); ``None`` for none. They get
            the model's inputs after these were cast to 16 bits, unless ``fp32_inputs`` names them.
        fp32_inputs: Names of arguments of ``forward`` that are not cast (O2, O3, O5), such as
            ``"timestep"``; of those in ``*args``, positions.
        fp32_buffers: Name patterns of buffers that stay fp32 in a converted model, in addition to
            any named ``inv_freq``. Code that combines them with activations has to cast.
        growth_interval: Clean steps before a dynamic scale grows.
        growth_factor: Multiplier of a growing scale; above 1.
        backoff_factor: Multiplier after an overflow; between 0 and 1.
        keep_fp32_values: Whether :func:`restore` also restores, bit for bit, the weights that no
            optimizer steps (frozen weights, inference-only models). Costs 4 bytes per element;
            the fp32 values of weights with masters, and of buffers, are always restored.

    Returns:
        The models as given (one, list or tuple), followed by the optimizers as given if there are
        any: ``model``, or ``model, optimizer``.

    Raises:
        RuntimeError: If the level is unknown or cannot honour an override; if a model is
            float64 at O1 or O4, on the meta device, or wrapped; if it is already prepared,
            unless both the old and the new level keep fp32 weights (O0, O1, O4); if an
            optimizer is already prepared, or an ``FP16_Optimizer``; if an earlier call has cast a
            weight to another dtype; under ``torch.inference_mode()``; if cuDNN is disabled.
        TypeError: If a model, optimizer or value has the wrong type.
        ValueError: If a number is out of range; if ``fp32_modules``, ``fp32_inputs`` or
            ``fp32_buffers`` names nothing, or the level casts no model; if a model is lazy; if a
            model or optimizer is given twice; if an optimizer has no parameters; if all have only
            parameters of other models.

    Examples:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        >>> model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
        >>> model.weight.dtype, next(amp.master_params(optimizer)).dtype
        (torch.bfloat16, torch.float32)
        >>> loss = model(torch.randn(8, 4)).pow(2).mean()
        >>> with amp.scale_loss(loss, optimizer) as scaled_loss:
        ...     scaled_loss.backward()
        >>> optimizer.step()

        Override single properties of the level:

        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        >>> model = amp.initialize(
        ...     model, opt_level="O5", fp32_modules=[torch.nn.LayerNorm], verbosity=0
        ... )
        >>> model[1].weight.dtype
        torch.float32
    """
    if not isinstance(verbosity, int):
        raise TypeError(f"verbosity is {verbosity!r}; it must be an integer: 0 or 1.")
    _amp_state.verbosity = verbosity
    if not _is_enabled(enabled, opt_level):
        _amp_state.opt_properties = Properties()
        warn_if_casts_stay()
        return models if optimizers is None else (models, optimizers)
    if not torch.backends.cudnn.enabled:
        raise RuntimeError(
            "amp.initialize needs torch.backends.cudnn.enabled = True; it is False. Mixed "
            "precision depends on cuDNN's low-precision kernels."
        )
    defaults = level_defaults(opt_level)
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "patch_torch_functions_type": patch_torch_functions_type,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "cast_model_outputs": cast_model_outputs,
    }
    properties = resolve(defaults, overrides, hard_override=_amp_state.hard_override)
    policy = to_policy(properties)
    plan = _plan(
        policy,
        fp32_modules=fp32_modules,
        fp32_inputs=fp32_inputs,
        fp32_buffers=fp32_buffers,
    )
    model_list = inputs.model_list(models, to_16_bits=plan.casts_down)
    inputs.check_models(model_list, plan)
    inputs.check_wrappers(listed(optimizers))
    optimizer_list = [] if optimizers is None else unwrapped(optimizers)
    inputs.check_optimizers(optimizer_list, model_list, policy)
    warn_if_emulated(policy, model_list)
    made = new_session(
        policy,
        ScaleRule(growth_factor, backoff_factor, growth_interval, min_loss_scale, max_loss_scale),
        models=model_list,
        num_losses=integer("num_losses", num_losses, least=1 if optimizer_list else 0),
        keep_fp32=flag("keep_fp32_values", keep_fp32_values),
        made_by="initialize",
        options=properties,
    )
    report.start_up(defaults, properties)
    with Undo() as undo:
        prepare(made, model_list, optimizer_list, plan, undo)
        undo.pop_all()
    _amp_state.opt_properties = properties
    _amp_state.min_loss_scale = min_loss_scale
    _amp_state.max_loss_scale = max_loss_scale
    return models if optimizers is None else (models, optimizers)


def restore(models: Any, optimizers: Any = None) -> Any:
    """Undoes :func:`initialize`: returns plain fp32 models and plain optimizers.

    The objects are changed in place: parameters hold their masters' fp32 values, optimizers step
    the models' own parameters and keep their state, and the original classes and hooks return.
    Op casts end with the last model of their call.

    Args:
        models: A prepared model, or what contains one, or a list or tuple of them.
        optimizers: Their optimizer, or a list or tuple of them; ``None`` if there are none.

    Returns:
        The arguments, in the form that :func:`initialize` returns; unchanged if all are plain, as
        copies are.

    Raises:
        ValueError: If only some of them are prepared; nothing changes in this case.
        RuntimeError: Under ``torch.inference_mode()``, for models that were converted.

    Example:
        >>> import torch
        >>> from apex import amp
        >>> model = torch.nn.Linear(4, 2)
        >>> model = amp.initialize(model, opt_level="O5", verbosity=0)
        >>> amp.restore(model).weight.dtype
        torch.float32
    """
    model_list = inputs.model_list(models)
    optimizer_list = [] if optimizers is None else [*dict.fromkeys(unwrapped(optimizers))]
    prepared = converted_in(model_list)
    if prepared or any(map(prepared_state, optimizer_list)):
        inputs.check_prepared(model_list, optimizer_list)
        drops_grads = make_plain(prepared, optimizer_list)
        if drops_grads:
            warn_at_caller(
                "amp.restore was called between an overflow and the step that amp would have "
                "skipped. It dropped the gradients, which hold inf or NaN: the next "
                "optimizer.step() changes nothing. To train on, compute them anew: "
                "loss.backward()"
            )
    return models if optimizers is None else (models, optimizers)


def state_dict(
    destination: OrderedDict[str, dict[str, Any]] | None = None,
) -> OrderedDict[str, dict[str, Any]]:
    """Returns the loss scales of the newest ``initialize`` call, in apex's checkpoint format.

    ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``, one entry per loss; empty
    before the first call. Entries of static scales are marked under ``apex_amp_v1``, a key that
    apex ignores.

    Args:
        destination: Dict to add the entries to and return; ``None`` for a new one.
    """
    result = OrderedDict() if destination is None else destination
    result.update(scaler_states.entries(_amp_state.scalers))
    return result


def load_state_dict(state_dict: Mapping[str, Any]) -> None:
    """Loads loss scales from the result of :func:`state_dict`, of this package or of apex.

    Call it after ``initialize``: it sets the scales of the newest call. After a call with
    ``enabled=False``, with nothing else prepared, it does nothing.

    A dynamic scale is not loaded into a static scaler, and a static scale is not loaded into a
    dynamic one; the logger ``apex`` reports it, unless one of the two is a static scale of 1. If
    the number of scalers differs, the first ones are loaded, with a warning.

    Args:
        state_dict: ``loss_scaler0`` and so on, each with ``loss_scale`` and ``unskipped``.

    Raises:
        RuntimeError: If there is no loss scale yet; if a key is unexpected or missing, or a value
            is invalid; the message names it. Nothing changes in this case.
    """
    scalers = _amp_state.scalers
    if not scalers:
        if not _amp_state.enabled:
            return
        raise RuntimeError(
            "amp.load_state_dict has no loss scale to load into. Call amp.initialize first."
        )
    scaler_states.set_scalers(scalers, scaler_states.parsed(state_dict))


def _is_enabled(enabled: object, opt_level: str) -> bool:
    if not (isinstance(enabled, str) and enabled in opt_levels):
        return flag("enabled", enabled)
    # Scripts pass the level by position, as in amp.initialize(model, optimizer, "O1").
    if enabled != opt_level:
        warn_at_caller(
            f"amp.initialize got enabled={enabled!r}, its third positional argument, which counts "
            f"as True; the level is {opt_level!r}. Pass the level by name: opt_level={enabled!r}."
        )
    return True


def _plan(policy: Policy, **names: Any) -> ModelPlan:
    dtype = policy.param_dtype
    as_it_comes = _amp_state.allow_incoming_model_not_fp32
    if as_it_comes and dtype is torch.float32:
        dtype = None
    return ModelPlan(
        param_dtype=dtype,
        output_dtype=policy.output_dtype,
        keep_batchnorm_fp32=policy.batchnorm_fp32,
        cast=_initialize.custom_cast(),
        widen_low=policy.compute_dtype is not None and not as_it_comes,
        **{name: inputs.rules(name, given) for name, given in names.items()},
    )
