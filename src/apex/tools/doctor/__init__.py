"""``apex doctor``: examines the machine and the installation."""
