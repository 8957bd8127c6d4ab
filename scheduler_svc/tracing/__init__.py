"""The spans of requests: the phases of their choices, which engine and lanes report."""
