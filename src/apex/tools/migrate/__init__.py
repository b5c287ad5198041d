"""What old scripts use of apex: a verdict on each use, and the way to ``torch.amp``.

libcst, which reads the scripts, is the extra ``migrate``.
"""
