"""Op casts: the regions where they are on, and the autocast kernels that torch lacks."""
