"""`python -m agentrl` is the same as the `agentrl` command."""

from agentrl.cli.main import main

if __name__ == "__main__":
    main()
