"""Remarks on names of apex: the differences in docs/compatibility.md that scripts may notice."""

from __future__ import annotations

from collections.abc import Mapping

_LEGACY_STATE = "Optimizer states saved by apex in 2019 do not load; models and loss scales do."
_PARAMETRIZED = (
    "State dicts use torch's keys (parametrizations.weight.original0); those with weight_g load."
)
_STACKED = "batch_first and dropout take effect; apex ignored them. Check what you pass."

NOTES: Mapping[str, str] = {
    # -- amp
    "apex.amp.init": (
        "The interface of 2018; docs/migrating.md shows the same with amp.initialize. "
        "enable_caching and verbose have no effect."
    ),
    "apex.amp.half_function": "Means the level's 16-bit type: bf16 at O4.",
    "apex.amp.register_half_function": "Means the level's 16-bit type: bf16 at O4.",
    "apex.amp.float_function": "All casts are off inside the function.",
    "apex.amp.register_float_function": "All casts are off inside the function.",
    "apex.amp._amp_state": (
        "loss_scalers and handle belong to the latest initialize call; reading a scale waits "
        "for the device. amp.state_dict() has all scales."
    ),
    "apex.amp.lists": (
        "A function and the method of the same name are one operator: removing either removes "
        "both. Change the lists before amp.initialize."
    ),
    "apex.amp.wrap": (
        "No wrapper is there, because no torch function is replaced. Use "
        "amp.register_half_function and the like for your own functions."
    ),
    "apex.amp._initialize": "A replaced applier or to_type takes effect at the next initialize.",
    # -- optimizers
    "apex.optimizers.FusedNovoGrad": (
        "Running norms are per-parameter state: apex's optimizer checkpoints do not load."
    ),
    "apex.optimizers.FusedLAMB": (
        "Leaves gradients unchanged; max_grad_norm=0 disables clipping (apex divided by it)."
    ),
    "apex.optimizers.FP16_Optimizer": (
        f"{_LEGACY_STATE} New code uses amp.initialize(opt_level='O2') (docs/migrating.md)."
    ),
    "apex.contrib.optimizers.FP16_Optimizer": (
        f"{_LEGACY_STATE} New code uses amp.initialize(opt_level='O2') (docs/migrating.md)."
    ),
    "apex.fp16_utils.FP16_Optimizer": (
        "Logs as 'apex' instead of printing. New code uses amp.initialize(opt_level='O2') "
        "(docs/migrating.md)."
    ),
    "apex.fp16_utils.DynamicLossScaler": (
        "Large finite gradients do not count as overflow; has_overflow waits for the device."
    ),
    # -- parallel
    "apex.parallel.DistributedDataParallel": (
        "Built on torch's: if a parameter may be unused, pass delay_allreduce=True or "
        "find_unused_parameters=True. It has no attribute allreduce_buffers."
    ),
    "apex.parallel.SyncBatchNorm": (
        "In eval() without running statistics, each rank uses its own batch; a single value "
        "per channel is refused in training."
    ),
    "apex.parallel.multiproc": (
        "All ranks write to the terminal (no GPU_<i>.log). New code uses torchrun."
    ),
    "apex.parallel.distributed.flat_dist_call": (
        "all_reduce averages over the group in extra_args; it refuses integers."
    ),
    "apex.parallel.distributed.apply_flat_dist_call": (
        "all_reduce averages over the group in extra_args; it refuses integers."
    ),
    # -- new here
    "apex.integrations": "Each module needs its library: Lightning 2, MMEngine or transformers.",
    # -- layers and losses
    "apex.normalization.MixedFusedLayerNorm": (
        "The result has the weight's dtype on the CPU, too (in apex: the input's)."
    ),
    "apex.normalization.MixedFusedRMSNorm": (
        "The result has the weight's dtype on the CPU, too (in apex: the input's)."
    ),
    "apex.contrib.layer_norm.layer_norm.FastLayerNormFN": (
        "A class with apply and forward, not a torch.autograd.Function; it has no backward."
    ),
    "apex.contrib.xentropy.SoftmaxCrossEntropyLoss": (
        "A module with a static method apply, not a torch.autograd.Function; it has no backward."
    ),
    "apex.mlp.MlpFunction": "apply also follows torch.autocast.",
    "apex.mlp.MLP": "weights and biases are new lists on each read: change the parameters.",
    "apex.RNN.LSTM": _STACKED,
    "apex.RNN.GRU": f"{_STACKED} Another output_size is refused.",
    "apex.RNN.ReLU": _STACKED,
    "apex.RNN.Tanh": _STACKED,
    "apex.RNN.mLSTM": _STACKED,
    **{
        f"apex.reparameterization.{name}": _PARAMETRIZED
        for name in (
            *("apply_weight_norm", "apply_reparameterization", "WeightNorm"),
            *("remove_weight_norm", "remove_reparameterization", "Reparameterization"),
        )
    },
}
"""Notes by full name; the note on a module also applies to its contents."""

REFUSED_KEYWORDS: Mapping[tuple[str, str], str] = {
    ("apex.parallel.DistributedDataParallel", "shared_param"): (
        "shared_param is refused, as in apex: use delay_allreduce=True."
    ),
}
"""Why an argument is refused, and the remedy, by callable and argument."""

_IDLE = "{} has no effect: remove it."

NOTED_KEYWORDS: Mapping[tuple[str, str], str] = {
    (name, keyword): _IDLE.format(keyword)
    for name, keywords in {
        "apex.amp.init": ("enable_caching", "verbose"),
        "apex.optimizers.FusedSGD": ("materialize_master_grads",),
        "apex.optimizers.FusedAdam": ("use_mt", "amp_scale_adjustment"),
        "apex.contrib.optimizers.FusedAdam": ("use_mt",),
        "apex.normalization.FusedLayerNorm": ("memory_efficient",),
        "apex.normalization.FusedRMSNorm": ("memory_efficient",),
        "apex.parallel.DistributedDataParallel": (
            *("allreduce_trigger_params", "num_allreduce_streams", "allreduce_communicators"),
            *("gradient_average_split_factor", "prof"),
        ),
    }.items()
    for keyword in keywords
}
"""Notes on arguments, by callable and argument."""

OPTIMIZER_ATTRIBUTES: Mapping[str, str] = {
    "_amp_stash": (
        "Absent before amp.initialize. Its lists are new on each read: change param_groups instead."
    ),
    "_lazy_init_maybe_master_weights": "Does nothing: masters exist from amp.initialize on.",
    "_amp_lazy_init": "Does nothing: masters exist from amp.initialize on.",
    "_master_params_to_model_params": "",
    "_prepare_amp_backward": "",
    "_post_amp_backward": "",
    "clip_master_grads": "",
    "update_master_grads": "",
}
"""Notes on attributes of optimizers that only amp and FP16_Optimizer add."""
