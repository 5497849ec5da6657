"""`agentrl doctor`: whether this machine can do what a config asks."""
