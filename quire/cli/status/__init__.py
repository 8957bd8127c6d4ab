"""What `quire status` and `quire shards` print: text and JSON. Called by `quire.cli.operations`."""
