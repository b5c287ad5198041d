collect_ignore = ["lightning_ranks.py"]  # a program, not a module with doctests
