"""Is the policy that is sampled the policy that is trained? Same tokens, two log-probabilities.

live (two services) or shared.parity.offline (two checkpoints) -> report -> terminal, JSON, page
"""
