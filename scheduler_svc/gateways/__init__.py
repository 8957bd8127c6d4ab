"""Gateways: the `Connect` streams, where messages become sequences and tokens become frames."""
