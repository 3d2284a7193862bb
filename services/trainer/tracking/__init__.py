"""Telling TensorBoard and Weights & Biases a run's numbers, from a process of its own.

    events.jsonl ──tail──> numbers by name and step ──> tensorboard/ , wandb/ of the run folder

It reads what the run has written anyway, so nothing that happens to it touches the job.
"""
