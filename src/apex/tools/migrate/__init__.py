"""Every use of apex in old scripts, with a verdict on whether it works here."""
