"""The `treering` command."""
