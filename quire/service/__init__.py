"""Code that all services share: settings, logs, health, metrics, addresses, servers, errors.

Imported by the services, the client and the launcher. It imports nothing of them.
"""
