"""The command `bench`: its options, their checks, and the table of results."""
