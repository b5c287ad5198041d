"""All contact with what torch keeps private or changes from release to release."""
