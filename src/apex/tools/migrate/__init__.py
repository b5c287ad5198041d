"""``apex migrate``: every use of apex in scripts, and whether it works here."""
