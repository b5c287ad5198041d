"""``apex compare``: trains one target at every level and judges the results."""
