"""What runs inside vLLM's own processes, and the learner's half of it. `import vllm` is the engine's."""
