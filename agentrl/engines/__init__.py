"""Clients and owners of engines: what is said to them, how many there are, what weights they hold."""
