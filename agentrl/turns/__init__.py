"""Messages to token ids and back: what `agentrl.renderer` is made of."""
