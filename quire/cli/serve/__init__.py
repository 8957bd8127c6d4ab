"""The command `serve`: its options, the flags of the services' settings, and its run."""
