"""A part of the stand-in for NVIDIA's apex."""

WHOSE = "theirs"
