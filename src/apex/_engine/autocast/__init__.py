"""Op casts: where they are on, and the kernels that torch lacks."""
