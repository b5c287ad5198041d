"""Values and rules that depend on torch alone: no hooks, no logging, no state between calls.

As in torch, a function whose name ends in an underscore modifies its arguments. Other functions are
pure unless their docstrings say otherwise.
"""
