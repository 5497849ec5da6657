"""Chats with a model that somebody else's agent holds over HTTP, and the records that become trajectories."""
