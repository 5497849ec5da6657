"""What the subcommands of `agentrl` do, and what they say."""
