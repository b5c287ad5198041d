"""Norms and layouts of lists of tensors."""
