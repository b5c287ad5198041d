"""The functions behind the command line: compare levels, examine a machine, check scripts."""
