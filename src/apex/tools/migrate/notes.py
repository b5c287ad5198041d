"""What is to be said of a name: the rows of docs/compatibility.md that a script may notice."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FUNCTION = "a class with apply and forward, no torch.autograd.Function: backward is not there."
_LEGACY_STATE = "Optimizer states that apex saved in 2019 do not load; models and scales do."
_PARAMETRIZED = (
    "State dicts have torch's keys (parametrizations.weight.original0); those with weight_g load."
)
_STACKED = "batch_first and dropout have an effect, which apex ignored; check what you pass."

NOTES: Mapping[str, str] = MappingProxyType(
    {
        # -- amp
        "apex.amp.init": (
            "The interface of 2018; docs/migrating.md turns it into amp.initialize. "
            "enable_caching and verbose change nothing."
        ),
        "apex.amp.half_function": "Means the level's 16-bit type: bf16 at O4.",
        "apex.amp.register_half_function": "Means the level's 16-bit type: bf16 at O4.",
        "apex.amp.float_function": "Inside the function all casts are off.",
        "apex.amp.register_float_function": "Inside the function all casts are off.",
        "apex.amp._amp_state": (
            "loss_scalers and handle are those of the newest initialize; reading a scale waits for "
            "the device. amp.state_dict() has all scales."
        ),
        "apex.amp.scaler.LossScaler": (
            "unscale_python is not there: use unscale, which works on every device."
        ),
        "apex.amp.lists": (
            "A function and the method of its name are one operator: removing either removes both. "
            "Change the lists before amp.initialize."
        ),
        "apex.amp.wrap": (
            "Only make_cast_wrapper and make_promote_wrapper: no function of torch is replaced. "
            "Use amp.register_half_function and its like for functions of your own."
        ),
        "apex.amp._initialize": "A replaced applier is seen by the next amp.initialize.",
        # -- optimizers
        "apex.optimizers.FusedNovoGrad": (
            "Running norms are state of each parameter: those of apex's checkpoints do not load."
        ),
        "apex.optimizers.FusedLAMB": (
            "Gradients are left as they are; max_grad_norm=0 clips nothing (apex divided by it)."
        ),
        "apex.optimizers.FP16_Optimizer": (
            f"{_LEGACY_STATE} amp.initialize(opt_level='O2') is today's form (docs/migrating.md)."
        ),
        "apex.contrib.optimizers.FP16_Optimizer": (
            f"{_LEGACY_STATE} amp.initialize(opt_level='O2') is today's form (docs/migrating.md)."
        ),
        "apex.fp16_utils.FP16_Optimizer": (
            "Logs as 'apex' in place of printing; amp.initialize(opt_level='O2') is today's form "
            "(docs/migrating.md)."
        ),
        "apex.fp16_utils.DynamicLossScaler": (
            "Large finite gradients are no overflow; has_overflow waits for the device."
        ),
        # -- parallel
        "apex.parallel.DistributedDataParallel": (
            "Built on torch's: where a parameter may stay unused pass delay_allreduce=True or "
            "find_unused_parameters=True. There is no allreduce_buffers attribute."
        ),
        "apex.parallel.SyncBatchNorm": (
            "In eval() without running statistics each rank goes by its own batch; one value per "
            "channel is refused in training."
        ),
        "apex.parallel.multiproc": (
            "Works, but all ranks write to the terminal (no GPU_<i>.log); torchrun is today's way."
        ),
        "apex.parallel.distributed.flat_dist_call": (
            "all_reduce averages over the group in extra_args; integers are refused."
        ),
        "apex.parallel.distributed.apply_flat_dist_call": (
            "all_reduce averages over the group in extra_args; integers are refused."
        ),
        # -- new here
        "apex.integrations": "Needs MMEngine: pip install 'apex-amp[mmengine]'.",
        # -- layers and losses
        "apex.normalization.MixedFusedLayerNorm": (
            "The result has the weight's dtype on a CPU, too (apex: the input's)."
        ),
        "apex.normalization.MixedFusedRMSNorm": (
            "The result has the weight's dtype on a CPU, too (apex: the input's)."
        ),
        **{
            f"apex.normalization.fused_layer_norm.{name}Function": f"This is {_FUNCTION}"
            for name in (
                *("FusedLayerNorm", "FusedLayerNormAffine", "FusedLayerNormAffineMixedDtypes"),
                *("FusedRMSNorm", "FusedRMSNormAffine", "FusedRMSNormAffineMixedDtypes"),
            )
        },
        "apex.contrib.layer_norm.layer_norm.FastLayerNormFN": f"This is {_FUNCTION}",
        "apex.contrib.xentropy.SoftmaxCrossEntropyLoss": (
            "A module whose apply is a static method, no torch.autograd.Function: backward is not "
            "there."
        ),
        "apex.mlp.MlpFunction": "apply follows torch.autocast, too; backward is not there.",
        "apex.mlp.MLP": "weights and biases are lists made when read: change the parameters.",
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
)
"""A note by full name; it holds for what is reached through a module named here, too."""

_TO_CONTRIB = "use apex.contrib.optimizers.FusedAdam, which still takes it."

REFUSED_KEYWORDS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("apex.optimizers.FusedAdam", "max_grad_norm"): (
            "max_grad_norm is refused: clip before the step with torch.nn.utils.clip_grad_norm_"
            f"(amp.master_params(optimizer), max_norm), or {_TO_CONTRIB}"
        ),
        ("apex.optimizers.FusedAdam", "eps_inside_sqrt"): (
            f"eps_inside_sqrt is refused: {_TO_CONTRIB}"
        ),
        ("apex.optimizers.FusedAdam", "use_mt"): (
            "use_mt is refused: leave it out, all parameters are stepped together."
        ),
        ("apex.optimizers.FusedAdam", "amp_scale_adjustment"): (
            "amp_scale_adjustment is refused: leave it out, amp unscales before the step."
        ),
        ("apex.parallel.DistributedDataParallel", "shared_param"): (
            "shared_param is refused, as in apex: use delay_allreduce=True."
        ),
    }
)
"""Why an argument is refused and what to do, by callable and argument."""

_IDLE = "{} changes nothing: leave it out."

NOTED_KEYWORDS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        (name, keyword): _IDLE.format(keyword)
        for name, keywords in {
            "apex.amp.init": ("enable_caching", "verbose"),
            "apex.optimizers.FusedSGD": ("materialize_master_grads",),
            "apex.contrib.optimizers.FusedAdam": ("use_mt",),
            "apex.normalization.FusedLayerNorm": ("memory_efficient",),
            "apex.normalization.FusedRMSNorm": ("memory_efficient",),
            "apex.parallel.DistributedDataParallel": (
                *("allreduce_trigger_params", "retain_allreduce_buffers", "num_allreduce_streams"),
                *("allreduce_communicators", "gradient_average_split_factor", "prof"),
            ),
        }.items()
        for keyword in keywords
    }
)
"""What is to be said of an argument, by callable and argument."""

OF_OPTIMIZERS: Mapping[str, str] = MappingProxyType(
    {
        "_amp_stash": (
            "Absent before amp.initialize. Its lists are made when read: change param_groups, not "
            "them."
        ),
        "_lazy_init_maybe_master_weights": "Does nothing: masters exist from initialize on.",
        "_amp_lazy_init": "Does nothing: masters exist from initialize on.",
        "_master_params_to_model_params": "",
        "_prepare_amp_backward": "",
        "_post_amp_backward": "",
        "clip_master_grads": "",
        "update_master_grads": "",
    }
)
"""What is to be said of attributes of optimizers that only amp and FP16_Optimizer have."""
