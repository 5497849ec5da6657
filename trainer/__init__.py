"""The learner: DeepSpeed and VCPO. Imports agentrl only."""
