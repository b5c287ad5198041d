"""The same training at level O4: bf16 operators, fp32 parameters."""

_base_ = "./fp32.py"

# Registers the wrapper under MMEngine's scope `apex`.
custom_imports = dict(imports=["apex.integrations.mmengine"])

optim_wrapper = dict(
    type="apex.ApexOptimWrapper",
    opt_level="O4",
    loss_scale=None,  # the level's default: bf16 needs no scaling
    clip_grad=dict(max_norm=5.0),
)
