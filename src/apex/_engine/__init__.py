"""Stateful objects; each piece of state has one owner.

Note [Glossary]
    session: One ``initialize`` call: the models, optimizers and scalers that it prepared.
    observer: Hears what happens in a session, and changes no number.
    wrapper: What wraps or shards a model, and shares its gradients among ranks.
    prepared optimizer: amp's state for one optimizer, and the optimizer's generated class.
    master: The fp32 parameter that an optimizer steps in place of a 16-bit parameter of a model.
    pair: A model parameter and its master. The master table knows all pairs of the process.
    synced: The model's parameter is the rounded master. Until one is written, the pair stays so.
    scaler: One loss's scale, static or dynamic, with its overflow flag ``found_inf``.
    pass: One backward pass in a ``scale_loss`` block.
    delayed pass: One that leaves its gradients unchecked, for the next pass or a step to check.
    stash: An optimizer's gradients from before a pass, added when the pass is unscaled.
    lender: An optimizer that a block was not given, and that lends its gradients to the block.
    overflow flag: A prepared optimizer's own flag, raised until a step consumes it.
    region: Code that runs under the op casts of a session.
    conversion: The change of a model's class, tensors and hooks by a plan.
    direct parameter: One that an optimizer steps without a master.
    sharers: Optimizers that step one parameter.
"""
