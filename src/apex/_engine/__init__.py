"""Stateful objects, one owner each; no module globals."""
