"""Runs Redis and the services as child processes on this machine."""
