"""An ordinary MMEngine config, which trains in fp32."""

collate = dict(type="default_collate")

model = dict(type="digits.Classifier")
train_dataloader = dict(
    batch_size=64,
    dataset=dict(type="digits.Digits", train=True),
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=collate,
)
val_dataloader = dict(
    batch_size=360,
    dataset=dict(type="digits.Digits", train=False),
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=collate,
)
val_evaluator = dict(type="digits.Accuracy")
train_cfg = dict(by_epoch=True, max_epochs=5, val_interval=1)
val_cfg = dict()
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=2e-3, weight_decay=0.01),
)
param_scheduler = dict(type="CosineAnnealingLR", by_epoch=True, T_max=5)
default_hooks = dict(
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=2),
    logger=dict(type="LoggerHook", interval=10),
)
randomness = dict(seed=0)
