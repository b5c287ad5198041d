"""What wraps or shards a model, and shares its gradients among ranks: one file for each kind.

Questions do not communicate; what does is called by all ranks in one order.
"""
