"""Numerics: pure functions and frozen values on torch alone; no hooks, no logging, no globals."""
