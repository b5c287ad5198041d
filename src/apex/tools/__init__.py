"""The work of the command line: compares levels, examines a machine, checks and traces scripts."""
