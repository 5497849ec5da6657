"""What `agentrl.env` is made of: environments, their registry, and one episode driven."""
