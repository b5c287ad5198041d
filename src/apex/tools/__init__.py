"""What the command line does, as functions: compare levels, and write what was found."""
