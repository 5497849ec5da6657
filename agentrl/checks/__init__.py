"""What `check_env` does to an environment beyond looking at its answers."""
