"""What a step of the learner costs, beside a plain step, the reference way and TRL."""
