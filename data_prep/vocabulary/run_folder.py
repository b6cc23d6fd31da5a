"""Names in the folder of a pre-training run by which its vocabulary is found; nothing heavy is loaded to know them."""

IN_A_RUN = "tokenizer"
"""The folder of a run that holds its vocabulary."""
CHECKPOINT = "checkpoint.json"
"""The file that a checkpoint of a run has; the run's folder is the second above it."""
