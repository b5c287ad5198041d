"""Stateful objects; each piece of state has one owner."""
