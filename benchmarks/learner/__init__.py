"""What a step of the learner costs, compared with a plain step, the reference method and TRL."""
