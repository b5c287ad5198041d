"""From ``amp.initialize`` and ``amp.scale_loss`` to ``torch.autocast`` and ``GradScaler``.

Note [Equivalent]
    At O1 and O4 amp leaves model and optimizer in fp32, and casts operators: those in the model's
    forward, and all others of the thread that called ``initialize``. So ``autocast`` has to stand
    around every statement of a training step that may compute, not only around the model's call.
    The scaler of fp16 scales between ``backward`` and ``step``, where amp's gradients are unscaled
    at once: what looks at gradients in between needs ``unscale_`` before it.

    Each file is judged alone, and changed only if all of its flow is understood. A reason to leave
    one place is a reason to leave the file.
"""
